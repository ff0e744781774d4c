"""A pass over a model in several regions, as one problem: each region is an op, and units are gathered and reduced
between them.

What regions gather and reduce in their own programs is in it as what is there anyway.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TypeVar

from graphshard.planner.problem import GatherTask, OwnCollective, Problem, ReductionTask, Transfer


@dataclass(frozen=True)
class RegionRun:
    """One run of a region in a pass.

    Attributes:
        problem: of its program when that gathers and reduces all that it uses.
        kept_bytes: of what it leaves for backward, negative where it takes that.
        gathers: units that are to be gathered before it -> FQNs, and the last run that uses them; None: they stay.
        reductions: units that may be reduced behind it.
    """

    problem: Problem
    kept_bytes: int = 0
    gathers: Mapping[str, tuple[tuple[str, ...], int | None]] = field(default_factory=dict)
    reductions: frozenset[str] = frozenset()

    def renamed(self, names: Mapping[str, tuple[str, str]]) -> RegionRun:
        """The same for another one of equal blocks. `names`: FQN -> the FQN and the unit of its parameter there."""
        gathers = (_renamed(gather, names) for gather in self.problem.gathers)
        reductions = (_renamed(reduction, names) for reduction in self.problem.reductions)
        return replace(self, problem=replace(self.problem, gathers=tuple(gathers), reductions=tuple(reductions)))


T = TypeVar("T", GatherTask, ReductionTask)


def _renamed(task: T, names: Mapping[str, tuple[str, str]]) -> T:
    fqn, mark, number = task.fqn.partition("#")
    name, unit = names.get(fqn, (fqn, task.unit))
    return replace(task, fqn=name + mark + number, unit=unit)


def pass_problem(runs: Sequence[RegionRun]) -> Problem:
    """The problem of a pass. A task is all of a unit; its FQN is the unit's name and the run that it is for.

    Args:
        runs: in order, at least one.
    """
    streams = tuple(dict.fromkeys(name for run in runs for name in run.problem.streams))
    gather_of: dict[str, GatherTask] = {}
    reductions_of: dict[str, dict[str, ReductionTask]] = {}
    for run in runs:
        stream = [streams.index(name) for name in run.problem.streams]
        for gather in run.problem.gathers:
            gather_of[gather.fqn] = replace(gather, transfer=_on(gather.transfer, stream))
        for reduction in run.problem.reductions:
            then = None if reduction.then is None else _on(reduction.then, stream)
            own = reductions_of.setdefault(reduction.unit, {})
            own[reduction.fqn] = replace(reduction, transfer=_on(reduction.transfer, stream), then=then)
    gathers: list[GatherTask] = []
    reductions: list[ReductionTask] = []
    own_collectives: list[OwnCollective] = []
    op_bytes: list[int] = []
    free_from: dict[str, int] = {}
    outside = {unit for run in runs for unit in (*run.gathers, *run.reductions)}
    for at, (run, elsewhere) in enumerate(zip(runs, _kept_elsewhere(runs), strict=True)):
        for unit, (fqns, last_run) in run.gathers.items():
            last_use = len(runs) if last_run is None else last_run
            if members := [gather_of[fqn] for fqn in fqns if fqn in gather_of]:
                gathers.append(_whole_gather(unit, members, at, last_use, free_from.get(unit, 0)))
                free_from[unit] = min(last_use + 1, len(runs))
        for unit in sorted(run.reductions & reductions_of.keys()):
            reductions.append(_whole_reduction(unit, [*reductions_of[unit].values()], at))
        stream = [streams.index(name) for name in run.problem.streams]
        inside = [gather for gather in run.problem.gathers if gather.unit not in outside]
        own_collectives += _inside(run.problem, outside, stream, at)
        op_bytes.append(max(run.problem.op_bytes, default=0) + elsewhere + sum(gather.full_bytes for gather in inside))
    return Problem(
        runs[0].problem.direction,
        tuple(str(at) for at in range(len(runs))),
        tuple(run.problem.compute_us for run in runs),
        tuple(op_bytes),
        tuple(gathers),
        tuple(reductions),
        tuple(own_collectives),
        streams,
        max(run.problem.contention for run in runs),
        max(run.problem.launch_us for run in runs),
    )


def _on(transfer: Transfer, stream: Sequence[int]) -> Transfer:
    return replace(transfer, stream=stream[transfer.stream])


def _kept_elsewhere(runs: Sequence[RegionRun]) -> list[int]:
    """Bytes kept for backward beside what each run itself leaves or takes, which its own problem counts."""
    taken = [min(run.kept_bytes, 0) for run in runs]
    left = [max(run.kept_bytes, 0) for run in runs]
    gone = list(accumulate(map(sum, zip(taken, [0, *left], strict=False))))
    before = -min(0, *gone)  # what an earlier pass has left: all that is taken before a run of this one leaves it
    return [before + bytes_gone for bytes_gone in gone]


def _whole_gather(unit: str, members: Sequence[GatherTask], at: int, last_use: int, ready: int) -> GatherTask:
    first = members[0]
    is_alone = len(members) == 1
    copied_out = sum(member.full_bytes for member in members)
    return replace(
        first,
        fqn=f"{unit}@{at}",
        unit=unit,
        key=first.transfer.stream,
        wire_bytes=sum(member.wire_bytes for member in members),
        full_bytes=copied_out,
        first_use=at,
        last_use=max(at, last_use),
        ready=min(ready, at),
        copy_in_us=sum(member.copy_in_us for member in members),
        copy_out_us=sum(member.copy_out_us for member in members),
        alone_in_us=first.alone_in_us if is_alone else sum(member.copy_in_us for member in members),
        alone_out_us=first.alone_out_us if is_alone else sum(member.copy_out_us for member in members),
        alone_out_bytes=first.alone_out_bytes if is_alone else copied_out,
        shard_bytes=sum(member.shard_bytes for member in members),
        scratch_bytes=sum(member.scratch_bytes for member in members),
        coalesced_us=None,
    )


def _whole_reduction(unit: str, members: Sequence[ReductionTask], at: int) -> ReductionTask:
    first = members[0]
    is_alone = len(members) == 1
    copies = 0 if first.then is None else first.then.stream + 1
    return replace(
        first,
        fqn=f"{unit}@{at}",
        unit=unit,
        key=first.transfer.stream * 1000 + copies,
        wire_bytes=sum(member.wire_bytes for member in members),
        grad_bytes=sum(member.grad_bytes or member.wire_bytes for member in members),
        shard_bytes=sum(member.shard_bytes for member in members),
        ready=at + 1,
        copy_in_us=sum(member.copy_in_us for member in members),
        copy_out_us=sum(member.copy_out_us for member in members),
        alone_in_us=first.alone_in_us if is_alone else sum(member.copy_in_us for member in members),
        alone_out_us=first.alone_out_us if is_alone else sum(member.copy_out_us for member in members),
        scratch_bytes=sum(member.scratch_bytes for member in members),
        coalesced_us=None,
    )


def _inside(problem: Problem, outside: set[str], stream: Sequence[int], at: int) -> list[OwnCollective]:
    """What a region sends itself: its model's own collectives, and those of units that it gathers and reduces."""
    num_bytes: defaultdict[tuple[str, str, Transfer], int] = defaultdict(int)
    for gather in problem.gathers:
        num_bytes["gather", gather.unit, gather.transfer] += gather.wire_bytes
    for reduction in problem.reductions:
        num_bytes["reduce", reduction.unit, reduction.transfer] += reduction.wire_bytes
        if reduction.then is not None:
            num_bytes["all-reduce", reduction.unit, reduction.then] += reduction.shard_bytes
    sent = [(own.name, own.stream, own.us) for own in problem.own]
    sent += [
        (f"{kind}:{unit}", transfer.stream, transfer.us(size))
        for (kind, unit, transfer), size in num_bytes.items()
        if unit not in outside
    ]
    return [OwnCollective(f"{at}: {name}", stream[on], us, at, at + 1) for name, on, us in sent]
