"""Realises an agreed order of collectives in a program: buckets and the order of their launches are given, where each
launch and wait stands is chosen here.

Ranks whose programs differ (other shapes, other graphs) send the same in the same order this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from graphshard.planner.problem import Problem, ReductionTask
from graphshard.planner.schedule import Bucket, Schedule, ScheduledStep, StepKind, check_schedule


class OrderImpossible(ValueError):
    """A program cannot launch its collectives in the order that is asked for."""


def realised_schedule(
    problem: Problem, buckets: Sequence[Bucket], hints: Sequence[tuple[StepKind, int]] = (), early: bool = True
) -> Schedule:
    """The schedule of `problem` that launches `buckets` in their order.

    A reduction is launched as soon as it and all before it can be. A gather is launched when what came before it in
    `hints` has arrived, in front of its first use at the latest.

    Args:
        problem: to schedule.
        buckets: all of its gathers and reductions, in order of launch.
        hints: (kind of step, index of a bucket) in the order of the program that they were planned for; empty: each
            gather is launched when the gather before it has arrived, each reduction awaited at the end.
        early: False: gathers are launched as late as the order allows, which holds the least memory.

    Raises:
        OrderImpossible: a bucket is needed before one that is launched in front of it can be.
    """
    end = len(problem.ops)
    earliest: list[int] = []
    latest: list[int] = []
    arrival: dict[int, int] = {}
    for number, bucket in enumerate(buckets):
        if bucket.kind == "gather":
            gathers = [problem.gathers[i] for i in bucket.members]
            earliest.append(max(g.ready for g in gathers))
            arrival[number] = min(g.first_use for g in gathers)
            latest.append(arrival[number])
        else:
            earliest.append(max(problem.reductions[i].ready for i in bucket.members))
            latest.append(end)
    latest = list(accumulate(reversed(latest), min))[::-1]
    for number, (first, last) in enumerate(zip(earliest, latest, strict=True)):
        if first > last:
            raise OrderImpossible(_impossible(problem, buckets, number))
    order = list(hints) or _usual_order(problem, buckets)
    _check_hints(buckets, order)
    steps: list[tuple[int, int, ScheduledStep]] = []
    arrived = launched = 0  # so far: of the steps up to here
    for turn, (kind, number) in enumerate(order):
        is_gather = buckets[number].kind == "gather"
        if kind == "launch":
            wanted = max(earliest[number], arrived if early else latest[number]) if is_gather else earliest[number]
            at = launched = max(min(wanted, latest[number]), launched)
        elif is_gather:
            at = arrival[number]
            arrived = max(arrived, at)
        else:  # behind all that came before it
            at = max(arrived, launched)
        steps.append((at, turn, ScheduledStep(at, kind, number)))
    found = Schedule(tuple(buckets), tuple(step for *_, step in sorted(steps)))
    check_schedule(problem, found)
    return found


def _usual_order(problem: Problem, buckets: Sequence[Bucket]) -> list[tuple[StepKind, int]]:
    steps: list[tuple[StepKind, int]] = []
    before = -1
    for number, bucket in enumerate(buckets):
        if bucket.kind == "gather":
            if before >= 0:
                steps.append(("wait", before))
            before = number
        steps.append(("launch", number))
    if before >= 0:
        steps.append(("wait", before))
    reductions = [number for number, bucket in enumerate(buckets) if bucket.kind == "reduce"]
    steps += [("wait", number) for number in reductions]
    return steps + [("finish", number) for number in reductions if _then(problem, buckets[number])]


def _then(problem: Problem, bucket: Bucket) -> bool:
    first: ReductionTask = problem.reductions[bucket.members[0]]
    return first.then is not None


def _check_hints(buckets: Sequence[Bucket], hints: Sequence[tuple[StepKind, int]]) -> None:
    launches = [number for kind, number in hints if kind == "launch"]
    if launches != list(range(len(buckets))):
        raise OrderImpossible(f"want the launches of {len(buckets)} buckets in their order, got {launches}")


def _impossible(problem: Problem, buckets: Sequence[Bucket], number: int) -> str:
    def named(i: int) -> str:
        members = buckets[i].members
        items = problem.gathers if buckets[i].kind == "gather" else problem.reductions
        return (
            f"{buckets[i].kind} of {', '.join(items[m].fqn for m in members[:2])}{', ...' if len(members) > 2 else ''}"
        )

    def last(i: int) -> int:
        bucket = buckets[i]
        return (
            min(problem.gathers[m].first_use for m in bucket.members) if bucket.kind == "gather" else len(problem.ops)
        )

    needed = min(range(number, len(buckets)), key=last)
    return (
        f"the {named(needed)} is needed before the {named(number)}, which is launched first, has what it sends: "
        "computation runs in another order here"
    )
