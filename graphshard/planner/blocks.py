"""Blocks that repeat are planned once: a problem of few of them, and the buckets found there for all of them.

A block lies between two changes of unit in the order of gathers. Blocks are alike if times, sizes and relative
positions are. Memory may differ: the blocks that stay stand for the fullest of those that go.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from graphshard.planner.costs import most_kept_bytes
from graphshard.planner.ground import Ends, Ground, Wish
from graphshard.planner.problem import Gather, OwnCollective, Problem, Reduction


@dataclass(frozen=True)
class Run:
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


def repeated(problem: Problem) -> Run | None:
    """The longest run of equal blocks, None if there is no pair."""
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
    return Run(tuple(edges), gathers, reductions)


def _signature(problem: Problem, begin: int, end: int) -> tuple[object, ...]:
    def moved(item: Gather | Reduction | OwnCollective, **positions: int) -> object:
        kept = min(positions.get("last_use", 0), end + 1)  # what is never freed is so in each block
        at = {name: position - begin for name, position in positions.items() if name != "last_use" and position}
        names = {"name": ""} if isinstance(item, OwnCollective) else {"fqn": "", "unit": ""}
        zero = dict.fromkeys(positions, 0)
        if isinstance(item, Gather):
            zero = {"first_use": 0, "last_use": 0, "ready": 0}
        return _plain(item, {**names, **zero}), tuple(sorted(at.items())), kept - begin if kept else 0

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


def _plain(item: Gather | Reduction | OwnCollective, without: dict[str, object]) -> object:
    return replace(item, **without)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Short:
    """A problem without the middle blocks of a run.

    Attributes:
        problem: what is left.
        run: of the full problem.
        front: blocks that stay in front of those that go.
        gone: blocks that go.
    """

    problem: Problem
    run: Run
    front: int
    gone: int

    def model(self, gathers: bool, i: int, period: int) -> int:
        """The short problem's member that stands for member `i`; blocks that went follow the last `period` in front."""
        edges = self.run.gathers if gathers else self.run.reductions
        cut, end = edges[self.front], edges[self.front + self.gone]
        if i < cut:
            return i
        if i >= end:
            return i - (end - cut)
        each = edges[1] - edges[0]
        back, place = divmod(i - cut, each)
        return cut - (period - back % period) * each + place


def shortened(problem: Problem, run: Run, blocks: int) -> Short:
    """`problem` with `blocks` of the blocks of `run`."""
    front, gone = (blocks + 1) // 2, run.count - blocks
    cut, end = run.begins[front], run.begins[front + gone]
    each, removed = run.begins[1] - run.begins[0], end - cut
    op_bytes = list(problem.op_bytes)
    for place in range(each):
        fullest = max(op_bytes[cut - each + place : end : each])
        op_bytes[cut - each + place] = fullest
    gathers = slice(run.gathers[front], run.gathers[front + gone])
    reductions = slice(run.reductions[front], run.reductions[front + gone])
    # What blocks that go would leave behind.
    left = sum(r.shard_bytes for r in problem.reductions[reductions])
    left += sum(most_kept_bytes(g) for g in problem.gathers[gathers] if g.last_use == len(problem.ops))
    op_bytes[end:] = [num_bytes + left for num_bytes in op_bytes[end:]]

    def moved(position: int) -> int:
        return position if position <= cut else max(cut, position - removed)

    return Short(
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
        run,
        front,
        gone,
    )


def transferred(short: Short, found: Wish, ground: Ground, full: Ground, period: int) -> Wish:
    """What `found`, of the short problem on `ground`, wishes for the full one; blocks repeat with `period`."""

    def ends(gathers: bool, of: Ends) -> Ends:
        sequences = ground.gathers if gathers else ground.reductions
        last = {sequence[end - 1] for sequence, places in zip(sequences, of, strict=True) for end in places}
        return tuple(
            frozenset(
                place
                for place, i in enumerate(sequence, start=1)
                if place == len(sequence) or short.model(gathers, i, period) in last
            )
            for sequence in (full.gathers if gathers else full.reductions)
        )

    return replace(found, gathers=ends(True, found.gathers), reductions=ends(False, found.reductions))
