"""A coarser problem, to search in less time: short ops are joined, and tasks needed or ready there at once are one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

from graphshard.planner.candidates import BucketEnds, Candidate
from graphshard.planner.costs import most_gathered_bytes
from graphshard.planner.problem import GatherTask, Problem, ReductionTask, Tasks, is_coalesced
from graphshard.planner.search_space import SearchSpace

# Ops are joined up to this part of the computation.
_GRAIN = 1 / 150


@dataclass(frozen=True)
class CoarseProblem:
    """A problem, and which of the finer one's tasks its tasks stand for.

    Attributes:
        problem: with fewer ops and tasks.
        gathers, reductions: of each task, the last index that it stands for.
    """

    problem: Problem
    gathers: tuple[int, ...]
    reductions: tuple[int, ...]

    def refined(self, candidate: Candidate, space: SearchSpace, full_space: SearchSpace) -> Candidate:
        """What a candidate for this problem, in its `space`, is for the finer one."""
        ends = candidate.gather_ends, candidate.reduction_ends
        return replace(
            candidate,
            gather_ends=_ends(ends[0], space.gather_sequences, self.gathers, full_space.gather_sequences),
            reduction_ends=_ends(ends[1], space.reduction_sequences, self.reductions, full_space.reduction_sequences),
        )


def _ends(found: BucketEnds, coarse: list[list[int]], last: tuple[int, ...], full: list[list[int]]) -> BucketEnds:
    behind = sorted({last[sequence[end - 1]] for sequence, ends in zip(coarse, found, strict=True) for end in ends})
    return tuple(
        frozenset(place for i in behind if (place := bisect_right(sequence, i))) | {len(sequence)} for sequence in full
    )


def coarsened(problem: Problem) -> CoarseProblem:
    """`problem` with about 150 ops that begin, if possible, with a unit."""
    starts = {b.first_use for a, b in pairwise(problem.gathers) if a.unit != b.unit}
    grain_us = problem.compute_us * _GRAIN
    begins: list[int] = []
    joined_us = 0.0
    for i, us in enumerate(problem.op_us):
        if not begins or joined_us + us > grain_us or (i in starts and 2.0 * joined_us > grain_us):
            begins.append(i)
            joined_us = 0.0
        joined_us += us
    edges = [*begins, len(problem.ops)]

    def inside(position: int) -> int:
        return bisect_right(edges, position) - 1

    def behind(position: int) -> int:
        at = inside(position)
        return at if edges[at] == position else at + 1

    gathers: list[tuple[GatherTask, int]] = []
    for _, group in groupby(
        enumerate(problem.gathers), lambda entry: (entry[1].unit, entry[1].key, inside(entry[1].first_use))
    ):
        members = list(group)
        first_use = inside(members[0][1].first_use)
        joined = _joined_gather([gather for _, gather in members])
        last_use = max(inside(joined.last_use), first_use)
        ready = min(behind(joined.ready), first_use)
        gathers.append((replace(joined, first_use=first_use, last_use=last_use, ready=ready), members[-1][0]))
    reductions: list[tuple[ReductionTask, int]] = []
    for _, pairs in groupby(
        enumerate(problem.reductions), lambda entry: (entry[1].unit, entry[1].key, behind(entry[1].ready))
    ):
        reduced = list(pairs)
        merged = _joined_reduction([reduction for _, reduction in reduced])
        reductions.append((replace(merged, ready=behind(merged.ready)), reduced[-1][0]))
    return CoarseProblem(
        replace(
            problem,
            ops=tuple(problem.ops[i] for i in begins),
            op_us=tuple(sum(problem.op_us[a:b]) for a, b in pairwise(edges)),
            op_bytes=tuple(max(problem.op_bytes[a:b]) for a, b in pairwise(edges)),
            gathers=tuple(gather for gather, _ in gathers),
            reductions=tuple(reduction for reduction, _ in reductions),
            own=tuple(replace(own, launch=inside(own.launch), wait=inside(own.wait)) for own in problem.own),
        ),
        tuple(last for _, last in gathers),
        tuple(last for _, last in reductions),
    )


def _joined_gather(members: Sequence[GatherTask]) -> GatherTask:
    if len(members) == 1:
        return members[0]
    gathered_bytes = sum(most_gathered_bytes(member) for member in members)
    return replace(
        members[0],
        **_together(members),
        full_bytes=gathered_bytes,
        last_use=max(member.last_use for member in members),
        alone_out_bytes=gathered_bytes if not is_coalesced(members) or any(m.alone_out_bytes for m in members) else 0,
    )


def _joined_reduction(members: Sequence[ReductionTask]) -> ReductionTask:
    if len(members) == 1:
        return members[0]
    return replace(
        members[0],
        **_together(members),
        grad_bytes=sum(member.grad_bytes for member in members),
    )


def _together(members: Tasks) -> dict[str, Any]:
    """Fields that gathers and reductions have, of several as one: copied as those would be, however it is sent."""
    names = ("wire_bytes", "shard_bytes", "scratch_bytes", "copy_in_us", "copy_out_us")
    found = {name: sum(getattr(member, name) for member in members) for name in names}
    alone = {"alone_in_us": found["copy_in_us"], "alone_out_us": found["copy_out_us"], "coalesced_us": None}
    if is_coalesced(members):
        alone = {name: sum(getattr(member, name) for member in members) for name in alone}
    return {**found, **alone, "ready": max(member.ready for member in members)}
