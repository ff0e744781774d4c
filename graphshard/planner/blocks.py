"""Blocks that repeat are planned once: a problem of few of them, and the buckets found there for all of them.

A block lies between two changes of unit in the order of gathers. Blocks are alike if times, sizes and relative
positions are. Memory may differ: the blocks that stay stand for the fullest of those that go.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from graphshard.planner.candidates import BucketEnds, Candidate
from graphshard.planner.costs import most_gathered_bytes
from graphshard.planner.problem import GatherTask, OwnCollective, Problem, ReductionTask
from graphshard.planner.search_space import SearchSpace


@dataclass(frozen=True)
class RepeatedBlocks:
    """Equal blocks in a row.

    Attributes:
        begins: the position of each block, and the one behind the last.
        gathers, reductions: the first index of each block, and the one behind the last.
    """

    begins: tuple[int, ...]
    gathers: tuple[int, ...]
    reductions: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return len(self.begins) - 1


def repeated_blocks(problem: Problem) -> RepeatedBlocks | None:
    """The longest row of equal blocks, None if there is no pair."""
    begins = [g.first_use for a, g in pairwise(problem.gathers) if g.unit != a.unit and g.first_use > a.first_use]
    signatures = [_signature(problem, begin, end) for begin, end in pairwise(begins)]
    best = (0, 0)
    first = 0
    for i in range(1, len(signatures) + 1):
        if i == len(signatures) or signatures[i] != signatures[first]:
            best = max(best, (i - first, -first))
            first = i
    count, first = best[0], -best[1]
    if count < 2:
        return None
    edges = begins[first : first + count + 1]
    gathers = tuple(sum(1 for g in problem.gathers if g.first_use < edge) for edge in edges)
    reductions = tuple(sum(1 for r in problem.reductions if r.ready <= edge) for edge in edges)
    return RepeatedBlocks(tuple(edges), gathers, reductions)


def _signature(problem: Problem, begin: int, end: int) -> tuple[object, ...]:
    def moved(item: GatherTask | ReductionTask | OwnCollective, **positions: int) -> object:
        last = min(positions.get("last_use", 0), end + 1)  # what is never freed is so in each block
        at = {name: position - begin for name, position in positions.items() if name != "last_use" and position}
        names = {"name": ""} if isinstance(item, OwnCollective) else {"fqn": "", "unit": ""}
        zero = dict.fromkeys(positions, 0)
        if isinstance(item, GatherTask):
            zero = {"first_use": 0, "last_use": 0, "ready": 0}
        return _plain(item, {**names, **zero}), tuple(sorted(at.items())), last - begin if last else 0

    return (
        tuple(round(us, 3) for us in problem.op_us[begin:end]),
        tuple(
            moved(g, first_use=g.first_use, last_use=g.last_use, ready=g.ready)
            for g in problem.gathers
            if begin <= g.first_use < end
        ),
        tuple(moved(r, ready=r.ready) for r in problem.reductions if begin < r.ready <= end),
        tuple(moved(own, launch=own.launch, wait=own.wait) for own in problem.own if begin <= own.launch < end),
    )


def _plain(item: GatherTask | ReductionTask | OwnCollective, without: dict[str, object]) -> object:
    return replace(item, **without)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ShortenedProblem:
    """A problem without the middle ones of its repeated blocks.

    Attributes:
        problem: what is left.
        blocks: of the full problem.
        front: blocks that stay in front of those that go.
        gone: blocks that go.
    """

    problem: Problem
    blocks: RepeatedBlocks
    front: int
    gone: int

    def stand_in(self, gathers: bool, i: int, period: int) -> int:
        """The task that stands for task `i` of the full problem; blocks that went follow the last `period` in front."""
        edges = self.blocks.gathers if gathers else self.blocks.reductions
        cut, end = edges[self.front], edges[self.front + self.gone]
        if i < cut:
            return i
        if i >= end:
            return i - (end - cut)
        each = edges[1] - edges[0]
        back, place = divmod(i - cut, each)
        return cut - (period - back % period) * each + place


def shortened(problem: Problem, blocks: RepeatedBlocks, count: int) -> ShortenedProblem:
    """`problem` with `count` of its repeated blocks."""
    front, gone = (count + 1) // 2, blocks.count - count
    cut, end = blocks.begins[front], blocks.begins[front + gone]
    each, removed = blocks.begins[1] - blocks.begins[0], end - cut
    op_bytes = list(problem.op_bytes)
    for place in range(each):
        fullest = max(op_bytes[cut - each + place : end : each])
        op_bytes[cut - each + place] = fullest
    gathers = slice(blocks.gathers[front], blocks.gathers[front + gone])
    reductions = slice(blocks.reductions[front], blocks.reductions[front + gone])
    # What blocks that go would leave behind.
    left = sum(r.shard_bytes for r in problem.reductions[reductions])
    left += sum(most_gathered_bytes(g) for g in problem.gathers[gathers] if g.last_use == len(problem.ops))
    op_bytes[end:] = [num_bytes + left for num_bytes in op_bytes[end:]]

    def moved(position: int) -> int:
        return position if position <= cut else max(cut, position - removed)

    return ShortenedProblem(
        Problem(
            direction=problem.direction,
            ops=problem.ops[:cut] + problem.ops[end:],
            op_us=problem.op_us[:cut] + problem.op_us[end:],
            op_bytes=tuple(op_bytes[:cut] + op_bytes[end:]),
            gathers=tuple(
                replace(g, first_use=moved(g.first_use), last_use=moved(g.last_use), ready=moved(g.ready))
                for g in problem.gathers[: gathers.start] + problem.gathers[gathers.stop :]
            ),
            reductions=tuple(
                replace(r, ready=moved(r.ready))
                for r in problem.reductions[: reductions.start] + problem.reductions[reductions.stop :]
            ),
            own=tuple(
                replace(own, launch=moved(own.launch), wait=moved(own.wait))
                for own in problem.own
                if not cut <= own.launch < end
            ),
            streams=problem.streams,
            contention=problem.contention,
            launch_us=problem.launch_us,
        ),
        blocks,
        front,
        gone,
    )


def expanded(
    short: ShortenedProblem, candidate: Candidate, space: SearchSpace, full_space: SearchSpace, period: int
) -> Candidate:
    """What a candidate for the shortened problem is for the full one.

    Args:
        short: the shortened problem.
        candidate: for it.
        space: of it.
        full_space: of the full problem.
        period: so many blocks have buckets of their own, then they repeat.
    """

    def ends(gathers: bool, of: BucketEnds) -> BucketEnds:
        sequences = space.gather_sequences if gathers else space.reduction_sequences
        last = {sequence[end - 1] for sequence, places in zip(sequences, of, strict=True) for end in places}
        return tuple(
            frozenset(
                place
                for place, i in enumerate(sequence, start=1)
                if place == len(sequence) or short.stand_in(gathers, i, period) in last
            )
            for sequence in (full_space.gather_sequences if gathers else full_space.reduction_sequences)
        )

    gather_ends, reduction_ends = ends(True, candidate.gather_ends), ends(False, candidate.reduction_ends)
    return replace(candidate, gather_ends=gather_ends, reduction_ends=reduction_ends)
