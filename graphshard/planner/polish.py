"""Small problems: launches, waits and buckets of a schedule are moved one by one, as long as the simulator gains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from graphshard.planner.baselines import in_launch_order
from graphshard.planner.problem import Problem
from graphshard.planner.schedule import Bucket, Schedule, ScheduledStep
from graphshard.planner.simulator import simulate

# So many gathers and reductions are a small problem.
SMALL = 8
# Moves are simulated as long as those from one start have no more ops in all.
_OPS = 20_000


def is_small(problem: Problem) -> bool:
    """Whether moves of single steps are affordable."""
    return len(problem.gathers) + len(problem.reductions) <= SMALL


def polished(problem: Problem, schedule: Schedule, budget_bytes: float) -> Schedule:
    """`schedule`, or a faster one within the budget that single moves lead to."""
    found = simulate(problem, schedule)
    best_us, best_bytes = found.step_us, sum(found.live_bytes)
    improved, left = True, _OPS // max(1, len(problem.ops))
    while improved:
        improved = False
        for other in _moved(problem, schedule):
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


def _moved(problem: Problem, schedule: Schedule) -> Iterator[Schedule]:
    """Valid schedules: one step moved, or two buckets merged or one split, and a step of these moved besides."""
    yield from _one_moved(problem, schedule)
    count = len(schedule.buckets)
    for a in range(count):
        for b in range(count):
            if a != b and _may_merge(problem, schedule, a, b):
                merged = _merged(schedule, a, b)
                if not _misplaced(problem, merged):
                    yield merged
                yield from _one_moved(problem, merged, a if a < b else a - 1)
    for a, bucket in enumerate(schedule.buckets):
        for i in bucket.members if len(bucket.members) > 1 else ():
            split = _split(schedule, a, i)
            yield split
            yield from _one_moved(problem, split, a)
            yield from _one_moved(problem, split, count)


def _one_moved(problem: Problem, schedule: Schedule, only: int = -1) -> Iterator[Schedule]:
    """One step, of bucket `only`, at every other place that it may have among the others, at every position there."""
    misplaced = _misplaced(problem, schedule)
    for i, step in enumerate(schedule.steps):
        if only not in (-1, step.bucket) or misplaced - {i}:
            continue
        earliest, latest = _window(problem, schedule, step)
        others = (*schedule.steps[:i], *schedule.steps[i + 1 :])
        # Behind the bucket's step before this one, and up to the one behind it.
        first = max((j + 1 for j in range(i) if others[j].bucket == step.bucket), default=0)
        last = min((j for j in range(i, len(others)) if others[j].bucket == step.bucket), default=len(others))
        for place in range(first, last + 1):
            low = max(others[place - 1].before, earliest) if place else earliest
            high = min(others[place].before, latest) if place < len(others) else latest
            for before in range(low, high + 1):
                moved = (*others[:place], step._replace(before=before), *others[place:])
                yield replace(schedule, steps=moved)


def _misplaced(problem: Problem, schedule: Schedule) -> set[int]:
    """The steps that are too early or too late, as those of a bucket with new members may be."""
    found = set[int]()
    for i, step in enumerate(schedule.steps):
        earliest, latest = _window(problem, schedule, step)
        if not earliest <= step.before <= latest:
            found.add(i)
    return found


def _window(problem: Problem, schedule: Schedule, step: ScheduledStep) -> tuple[int, int]:
    """The first and the last position of a step, whatever the others'."""
    bucket = schedule.buckets[step.bucket]
    if step.kind == "launch":
        return max(member.ready for member in schedule.members(problem, step.bucket)), len(problem.ops)
    if step.kind == "wait" and bucket.kind == "gather":
        return 0, min(problem.gathers[i].first_use for i in bucket.members)
    return 0, len(problem.ops)


def _may_merge(problem: Problem, schedule: Schedule, a: int, b: int) -> bool:
    first, second = (schedule.buckets[number] for number in (a, b))
    return first.kind == second.kind and (schedule.members(problem, a)[0].key == schedule.members(problem, b)[0].key)


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
