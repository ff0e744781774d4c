"""Small problems: launches, waits and buckets of a schedule are moved one by one, as long as the simulator gains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from graphshard.planner.baselines import in_launch_order
from graphshard.planner.problem import Problem
from graphshard.planner.schedule import Bucket, Schedule, ScheduledStep, check_schedule
from graphshard.planner.simulator import simulate

# So many gathers and reductions are a small problem.
SMALL = 8
# So many moves are simulated at most, from one start.
_MOVES = 2500


def is_small(problem: Problem) -> bool:
    """Whether moves of single steps are affordable."""
    return len(problem.gathers) + len(problem.reductions) <= SMALL


def polished(problem: Problem, schedule: Schedule, budget_bytes: float) -> Schedule:
    """`schedule`, or a faster one within the budget that single moves lead to."""
    found = simulate(problem, schedule)
    best_us, best_bytes = found.step_us, sum(found.live_bytes)
    improved, left = True, _MOVES
    while improved:
        improved = False
        for other in _moved(problem, schedule):
            if not _is_valid(problem, other):
                continue
            left -= 1
            if left < 0:
                break
            found = simulate(problem, other)
            if found.peak_bytes > budget_bytes or found.step_us > best_us:
                continue
            # What is as fast and holds less leaves room for the next move.
            if found.step_us < best_us * (1.0 - 1e-9) or sum(found.live_bytes) < best_bytes:
                schedule, improved = other, True
                best_us, best_bytes = found.step_us, sum(found.live_bytes)
                break
    return in_launch_order(schedule)


def _is_valid(problem: Problem, schedule: Schedule) -> bool:
    try:
        check_schedule(problem, schedule)
    except ValueError:
        return False
    return True


def _moved(problem: Problem, schedule: Schedule) -> Iterator[Schedule]:
    yield from _one_moved(problem, schedule)
    count = len(schedule.buckets)
    for a in range(count):
        for b in range(count):
            if a != b and schedule.buckets[a].kind == schedule.buckets[b].kind:
                merged = _merged(schedule, a, b)
                yield merged
                yield from _one_moved(problem, merged, a if a < b else a - 1)
    for a, bucket in enumerate(schedule.buckets):
        for i in bucket.members if len(bucket.members) > 1 else ():
            split = _split(schedule, a, i)
            yield split
            yield from _one_moved(problem, split, a)
            yield from _one_moved(problem, split, count)


def _one_moved(problem: Problem, schedule: Schedule, only: int = -1) -> Iterator[Schedule]:
    """One step at every other place among the others, and at every position that it may have there."""
    for i, step in enumerate(schedule.steps):
        if only in (-1, step.bucket):
            others = (*schedule.steps[:i], *schedule.steps[i + 1 :])
            for place in range(len(others) + 1):
                low = others[place - 1].before if place else 0
                high = others[place].before if place < len(others) else len(problem.ops)
                for before in range(low, high + 1):
                    moved = (*others[:place], step._replace(before=before), *others[place:])
                    yield replace(schedule, steps=moved)


def _merged(schedule: Schedule, a: int, b: int) -> Schedule:
    """Members of bucket `b` in bucket `a`, with the steps of `a`."""
    members = tuple(sorted(schedule.buckets[a].members + schedule.buckets[b].members))
    buckets = list(schedule.buckets)
    buckets[a] = Bucket(buckets[a].kind, members)
    del buckets[b]
    steps = [x._replace(bucket=x.bucket - (x.bucket > b)) for x in schedule.steps if x.bucket != b]
    return Schedule(tuple(buckets), tuple(steps))


def _split(schedule: Schedule, a: int, member: int) -> Schedule:
    """`member` in a bucket of its own, behind each step of bucket `a`."""
    bucket = schedule.buckets[a]
    buckets = list(schedule.buckets)
    buckets[a] = Bucket(bucket.kind, tuple(i for i in bucket.members if i != member))
    buckets.append(Bucket(bucket.kind, (member,)))
    steps = list[ScheduledStep]()
    for step in schedule.steps:
        steps.append(step)
        if step.bucket == a:
            steps.append(step._replace(bucket=len(buckets) - 1))
    return Schedule(tuple(buckets), tuple(steps))
