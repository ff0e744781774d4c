"""The best schedule of a small problem, by trying all of a large family."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from graphshard.planner import Bucket, Problem, Schedule, ScheduledStep, StepKind, simulate


def optimum_us(problem: Problem, budget_bytes: float) -> float:
    """The least simulated time within a budget.

    Tried are, for gathers and for reductions of one key each: all partitions into intervals; for each bucket every
    position of the launch, in order within its kind, at or behind its readiness; gathers are awaited at their first
    use; a reduction at every position from its launch on, in order, or at the end. At one position: waits for
    reductions, launches of reductions, launches of gathers, waits for gathers; or gathers' launches before reductions'.
    """
    best = float("inf")
    for gathers, reductions in product(partitions(len(problem.gathers)), partitions(len(problem.reductions))):
        buckets = [Bucket("gather", part) for part in gathers] + [Bucket("reduce", part) for part in reductions]
        for gather_at, reduce_at in product(launches(problem, gathers), reductions_at(problem, reductions)):
            for gathers_first in (False, True):
                steps: list[tuple[int, int, int, StepKind]] = []
                for n, (part, at) in enumerate(zip(gathers, gather_at, strict=True)):
                    use = min(problem.gathers[i].first_use for i in part)
                    steps += [(at, 1 if gathers_first else 3, n, "launch"), (use, 4, n, "wait")]
                for n, (launch, wait) in enumerate(reduce_at, start=len(gathers)):
                    steps += [(launch, 2, n, "launch"), (wait, 0 if wait > launch else 5, n, "wait")]
                steps.sort()
                schedule = Schedule(tuple(buckets), tuple(ScheduledStep(at, kind, n) for at, _, n, kind in steps))
                found = simulate(problem, schedule)
                if found.peak_bytes <= budget_bytes:
                    best = min(best, found.step_us)
    return best


def partitions(count: int) -> Iterator[list[tuple[int, ...]]]:
    for cuts in product((False, True), repeat=max(0, count - 1)):
        parts, part = [], list[int]()
        for i in range(count):
            part.append(i)
            if i == count - 1 or cuts[i]:
                parts.append(tuple(part))
                part = []
        yield parts


def launches(problem: Problem, parts: list[tuple[int, ...]], least: int = 0) -> Iterator[tuple[int, ...]]:
    if not parts:
        yield ()
        return
    use = min(problem.gathers[i].first_use for i in parts[0])
    for at in range(max(least, *(problem.gathers[i].ready for i in parts[0])), use + 1):
        for others in launches(problem, parts[1:], at):
            yield (at, *others)


def reductions_at(
    problem: Problem, parts: list[tuple[int, ...]], least: int = 0
) -> Iterator[tuple[tuple[int, int], ...]]:
    if not parts:
        yield ()
        return
    end = len(problem.ops)
    for launch in range(max(least, *(problem.reductions[i].ready for i in parts[0])), end + 1):
        for wait in range(launch, end + 1):
            for others in reductions_at(problem, parts[1:], launch):
                if not others or others[0][1] >= wait:
                    yield ((launch, wait), *others)
