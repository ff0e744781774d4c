"""Schedules that are no search: FSDP2's, one collective per parameter, and buckets of a fixed size."""

from __future__ import annotations

from collections.abc import Sequence

from graphshard.planner.problem import Problem
from graphshard.planner.schedule import Bucket, Schedule, ScheduledStep

FIXED_BYTES = 500_000_000


def fsdp2_schedule(problem: Problem) -> Schedule:
    """One bucket per unit; the next gather is launched when one has arrived; one reduction is in flight.

    Source: FSDP2's implicit prefetch in forward and backward, and its one reduce-scatter input buffer.
    """
    gathers = _grouped([(g.unit, g.key) for g in problem.gathers])
    reductions = _grouped([(r.unit, r.key) for r in problem.reductions])
    return _launched_as_in_fsdp2(problem, gathers, reductions)


def per_parameter_schedule(problem: Problem) -> Schedule:
    """One collective per parameter, each launched where it is awaited."""
    buckets = [Bucket("gather", (i,)) for i in range(len(problem.gathers))]
    buckets += [Bucket("reduce", (i,)) for i in range(len(problem.reductions))]
    steps = []
    for number, bucket in enumerate(buckets):
        if bucket.kind == "gather":
            at = problem.gathers[bucket.members[0]].first_use
            steps += [ScheduledStep(at, "launch", number), ScheduledStep(at, "wait", number)]
        else:
            reduction = problem.reductions[bucket.members[0]]
            steps += [ScheduledStep(reduction.ready, "launch", number), ScheduledStep(reduction.ready, "wait", number)]
            if reduction.then is not None:
                steps.append(ScheduledStep(reduction.ready, "finish", number))
    return in_launch_order(Schedule(tuple(buckets), tuple(sorted(steps, key=lambda step: step.before))))


def fixed_size_schedule(problem: Problem, bucket_bytes: int = FIXED_BYTES) -> Schedule:
    """Buckets filled in order up to `bucket_bytes`, launched as in FSDP2."""
    gathers = _filled([(g.key, g.wire_bytes) for g in problem.gathers], bucket_bytes)
    reductions = _filled([(r.key, r.wire_bytes) for r in problem.reductions], bucket_bytes)
    return _launched_as_in_fsdp2(problem, gathers, reductions)


def _grouped(names: Sequence[tuple[str, int]]) -> list[tuple[int, ...]]:
    groups: dict[tuple[str, int], list[int]] = {}
    for i, name in enumerate(names):
        groups.setdefault(name, []).append(i)
    return [tuple(members) for members in groups.values()]


def _filled(sizes: Sequence[tuple[int, int]], bucket_bytes: int) -> list[tuple[int, ...]]:
    done: list[tuple[int, ...]] = []
    filling: dict[int, tuple[list[int], int]] = {}
    for i, (key, num_bytes) in enumerate(sizes):
        members, filled = filling.get(key, ([], 0))
        if members and filled + num_bytes > bucket_bytes:
            done.append(tuple(members))
            members, filled = [], 0
        filling[key] = ([*members, i], filled + num_bytes)
    return done + [tuple(members) for members, _ in filling.values()]


def _launchable(problem: Problem, members: tuple[int, ...]) -> list[tuple[int, ...]]:
    """A bucket, cut in front of what is ready only behind the first use of another member."""
    parts: list[tuple[int, ...]] = []
    for i in members:
        need = problem.gathers[parts[-1][0]].first_use if parts else -1
        if problem.gathers[i].ready <= need:
            parts[-1] = (*parts[-1], i)
        else:
            parts.append((i,))
    return parts


def _launched_as_in_fsdp2(
    problem: Problem, gathers: list[tuple[int, ...]], reductions: list[tuple[int, ...]]
) -> Schedule:
    end = len(problem.ops)
    gathers = [part for members in gathers for part in _launchable(problem, members)]
    gathers = sorted(gathers, key=lambda members: min(problem.gathers[i].first_use for i in members))
    reductions = sorted(reductions, key=lambda members: max(problem.reductions[i].ready for i in members))
    buckets = [Bucket("gather", members) for members in gathers]
    buckets += [Bucket("reduce", members) for members in reductions]
    # In order, at one position: reductions, gathers, what waits for the end.
    steps: list[tuple[int, int, int, ScheduledStep]] = []

    def add(turn: int, step: ScheduledStep) -> None:
        steps.append((step.before, turn, len(steps), step))

    at = 0
    for number, members in enumerate(gathers):
        add(1, ScheduledStep(max(at, *(problem.gathers[i].ready for i in members)), "launch", number))
        at = min(problem.gathers[i].first_use for i in members)
        add(1, ScheduledStep(at, "wait", number))
    previous = -1
    for number, members in enumerate(reductions, start=len(gathers)):
        ready = max(problem.reductions[i].ready for i in members)
        if previous >= 0:
            add(0, ScheduledStep(ready, "wait", previous))
        add(0, ScheduledStep(ready, "launch", number))
        previous = number
    if previous >= 0:
        add(2, ScheduledStep(end, "wait", previous))
    for number, members in enumerate(reductions, start=len(gathers)):
        if problem.reductions[members[0]].then is not None:
            add(2, ScheduledStep(end, "finish", number))
    steps.sort(key=lambda entry: entry[:3])
    return in_launch_order(Schedule(tuple(buckets), tuple(step for *_, step in steps)))


def in_launch_order(schedule: Schedule) -> Schedule:
    """The same, its buckets numbered in order of their launches."""
    order = [step.bucket for step in schedule.steps if step.kind == "launch"]
    number_of = {old: new for new, old in enumerate(order)}
    steps = tuple(step._replace(bucket=number_of[step.bucket]) for step in schedule.steps)
    return Schedule(tuple(schedule.buckets[old] for old in order), steps)
