"""Realises an agreed order of collectives in a program: buckets and the order of their launches are given, where each
launch and wait stands is chosen here.

Ranks whose programs differ (other shapes, other graphs) send the same in the same order this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from graphshard.planner.problem import Problem
from graphshard.planner.schedule import (
    Bucket,
    OwnPlace,
    Schedule,
    ScheduledStep,
    StepKind,
    check_schedule,
    passes_on,
    shared_own,
)


class OrderImpossible(ValueError):
    """A program cannot launch its collectives in the order that is asked for."""


def realised_schedule(
    problem: Problem,
    buckets: Sequence[Bucket],
    hints: Sequence[tuple[StepKind, int]] = (),
    early: bool = True,
    own: Sequence[OwnPlace] | None = None,
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
        own: where each of `shared_own(problem)` is to stand; None: wherever it does.

    Raises:
        OrderImpossible: a bucket is needed before one that is launched in front of it can be, or has what it sends
            behind one of the model's own collectives that is to stand behind it.
    """
    order = list(hints) or _usual_order(problem, buckets)
    _check_hints(buckets, order)
    bounds = _Bounds(problem, buckets)
    bounds.check_needs()
    if own is not None:
        passing_on = [number for kind, number in order if kind == "wait" and passes_on(problem, buckets[number])]
        bounds.keep_own(own, passing_on)
    earliest, latest = bounds.earliest, bounds.latest
    steps: list[tuple[int, int, ScheduledStep]] = []
    arrived = launched = 0  # so far: of the steps up to here
    for turn, (kind, number) in enumerate(order):
        is_gather = buckets[number].kind == "gather"
        if kind == "launch":
            wanted = max(earliest[number], arrived if early else latest[number]) if is_gather else earliest[number]
            at = launched = max(min(wanted, latest[number]), launched)
        elif is_gather:
            at = bounds.arrival[number]
            arrived = max(arrived, at)
        else:  # behind all that came before it
            first, last = bounds.passing_on.get(number, (0, len(problem.ops)))
            at = max(arrived, launched, first)
            at = min(at, last) if kind == "wait" else at
        steps.append((at, turn, ScheduledStep(at, kind, number)))
    found = Schedule(tuple(buckets), tuple(step for *_, step in sorted(steps)))
    check_schedule(problem, found)
    return found


class _Bounds:
    """Between which positions each bucket can be launched.

    Attributes:
        earliest, latest: by bucket; latest, with all that are launched behind it.
        arrival: of gathers: their first use.
        passing_on: (earliest, latest) of the wait of a reduce-scatter, behind which an all-reduce is launched.
    """

    def __init__(self, problem: Problem, buckets: Sequence[Bucket]) -> None:
        self._problem, self._buckets, self._end = problem, buckets, len(problem.ops)
        self.arrival: dict[int, int] = {}
        self.passing_on: dict[int, tuple[int, int]] = {}
        self.earliest: list[int] = []
        latest: list[int] = []
        for number, bucket in enumerate(buckets):
            if bucket.kind == "gather":
                gathers = [problem.gathers[i] for i in bucket.members]
                self.earliest.append(max(g.ready for g in gathers))
                self.arrival[number] = min(g.first_use for g in gathers)
                latest.append(self.arrival[number])
            else:
                self.earliest.append(max(problem.reductions[i].ready for i in bucket.members))
                latest.append(self._end)
        self.latest = _with_later(latest)

    def keep_own(self, own: Sequence[OwnPlace], passing_on: Sequence[int]) -> None:
        """Has every bucket on its side of the model's own collectives.

        Args:
            own: their places.
            passing_on: buckets with an all-reduce behind them, in order of that.

        Raises:
            OrderImpossible: a bucket cannot be there.
        """
        latest = list(self.latest)
        for its, place in zip(shared_own(self._problem), own, strict=True):
            for bucket in range(len(self._buckets)):
                if bucket < place.launched:
                    latest[bucket] = min(latest[bucket], its.launch)
                else:
                    self.earliest[bucket] = max(self.earliest[bucket], its.launch + 1)
            for turn, bucket in enumerate(passing_on):
                first, last = self.passing_on.get(bucket, (0, self._end))
                if turn < place.passed_on:
                    self.passing_on[bucket] = first, min(last, its.launch)
                    latest[bucket] = min(latest[bucket], its.launch)
                else:
                    self.passing_on[bucket] = max(first, its.launch + 1), last
        self.latest = _with_later(latest)
        if (number := self._first_impossible()) is not None:
            raise OrderImpossible(
                f"the {self._named(number)} cannot be launched on that side of the model's own collectives over the "
                "same group on which it is to be: computation runs in another order here"
            )

    def check_needs(self) -> None:
        """Raises:
        OrderImpossible: a bucket is needed before it can be launched.
        """
        if (number := self._first_impossible()) is not None:
            needed = min(range(number, len(self._buckets)), key=lambda i: self.arrival.get(i, self._end))
            raise OrderImpossible(
                f"the {self._named(needed)} is needed before the {self._named(number)}, which is launched first, has "
                "what it sends: computation runs in another order here"
            )

    def _first_impossible(self) -> int | None:
        bounds = enumerate(zip(self.earliest, self.latest, strict=True))
        return next((number for number, (first, last) in bounds if first > last), None)

    def _named(self, number: int) -> str:
        bucket = self._buckets[number]
        items = self._problem.gathers if bucket.kind == "gather" else self._problem.reductions
        names = ", ".join(items[i].fqn for i in bucket.members[:2])
        return f"{bucket.kind} of {names}{', ...' if len(bucket.members) > 2 else ''}"


def _with_later(latest: Sequence[int]) -> list[int]:
    """Each with those behind it: they are launched in their order."""
    return list(accumulate(reversed(latest), min))[::-1]


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
    return steps + [("finish", number) for number in reductions if passes_on(problem, buckets[number])]


def _check_hints(buckets: Sequence[Bucket], hints: Sequence[tuple[StepKind, int]]) -> None:
    launches = [number for kind, number in hints if kind == "launch"]
    if launches != list(range(len(buckets))):
        raise OrderImpossible(f"want the launches of {len(buckets)} buckets in their order, got {launches}")
