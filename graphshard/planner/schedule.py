"""What a planner decides: which collectives become one, and when each is launched and awaited."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from graphshard.planner.problem import OwnCollective, Problem, Tasks

# Launch: copy-in and launch. Wait: wait and copy-out, or, where a reduce-scatter is followed by an all-reduce, wait and
# launch of that. Finish: wait and copy-out of that all-reduce.
StepKind = Literal["launch", "wait", "finish"]


@dataclass(frozen=True)
class Bucket:
    """Gathers, or reductions, that become one collective.

    Attributes:
        kind: which of the two.
        members: indices into `Problem.gathers` or `Problem.reductions`, in order.
    """

    kind: Literal["gather", "reduce"]
    members: tuple[int, ...]


class ScheduledStep(NamedTuple):
    """One step of a bucket.

    Attributes:
        before: the position at which it happens; several at one position happen in the order of the schedule.
        kind: what happens, see `StepKind`.
        bucket: index into the schedule's buckets.
    """

    before: int
    kind: StepKind
    bucket: int


@dataclass(frozen=True)
class Schedule:
    """Buckets, and everything that happens to them in program order.

    Attributes:
        buckets: in order of launch.
        steps: in program order.
    """

    buckets: tuple[Bucket, ...]
    steps: tuple[ScheduledStep, ...]

    def members(self, problem: Problem, bucket: int) -> Tasks:
        """The members of a bucket."""
        found = self.buckets[bucket]
        if found.kind == "gather":
            return [problem.gathers[i] for i in found.members]
        return [problem.reductions[i] for i in found.members]


@dataclass(frozen=True)
class OwnPlace:
    """Where a collective of the model's own stands among those that are scheduled.

    Attributes:
        launched: number of buckets that are launched before it.
        passed_on: number of all-reduces behind reduce-scatters that are.
    """

    launched: int
    passed_on: int = 0


def shared_own(problem: Problem) -> list[OwnCollective]:
    """The model's own collectives on streams that gathers and reductions use, too: all ranks need them in one order."""
    streams = {gather.transfer.stream for gather in problem.gathers}
    streams |= {reduction.transfer.stream for reduction in problem.reductions}
    streams |= {reduction.then.stream for reduction in problem.reductions if reduction.then is not None}
    return [own for own in problem.own if own.stream in streams]


def own_places(problem: Problem, schedule: Schedule) -> tuple[OwnPlace, ...]:
    """Of each of `shared_own`."""
    launches = [step.before for step in schedule.steps if step.kind == "launch"]
    passing_on = [
        step.before
        for step in schedule.steps
        if step.kind == "wait" and passes_on(problem, schedule.buckets[step.bucket])
    ]
    return tuple(
        OwnPlace(sum(at <= own.launch for at in launches), sum(at <= own.launch for at in passing_on))
        for own in shared_own(problem)
    )


def passes_on(problem: Problem, bucket: Bucket) -> bool:
    """Whether it is a reduce-scatter with an all-reduce behind it."""
    return bucket.kind == "reduce" and problem.reductions[bucket.members[0]].then is not None


def check_schedule(problem: Problem, schedule: Schedule) -> None:
    """Raises:
    ValueError: if `schedule` is none for `problem`; it says which bucket, and why.
    """
    for error in _errors(problem, schedule):
        raise ValueError(f"schedule: {error}")


def _errors(problem: Problem, schedule: Schedule) -> Iterator[str]:
    for kind, count in (("gather", len(problem.gathers)), ("reduce", len(problem.reductions))):
        found = sorted(i for bucket in schedule.buckets if bucket.kind == kind for i in bucket.members)
        if found != list(range(count)):
            yield f"want each of {count} members of kind {kind} in one bucket, got {found}"
            return
    place: dict[tuple[int, StepKind], int] = {}
    for i, step in enumerate(schedule.steps):
        if (step.bucket, step.kind) in place:
            yield f"bucket {step.bucket}: two of step {step.kind}"
        place[step.bucket, step.kind] = i
        if not 0 <= step.before <= len(problem.ops) or (i and step.before < schedule.steps[i - 1].before):
            yield f"bucket {step.bucket}: {step.kind} at position {step.before}, out of order"
    for number, bucket in enumerate(schedule.buckets):
        members = schedule.members(problem, number)
        if len({member.key for member in members}) != 1:
            yield f"bucket {number}: members of several keys"
        kinds: list[StepKind] = ["launch", "wait"]
        if passes_on(problem, bucket):
            kinds.append("finish")
        places = [place.get((number, kind), -1) for kind in kinds]
        if -1 in places or places != sorted(places):
            yield f"bucket {number}: want {', '.join(kinds)}, in this order"
            return
        launch, wait = (schedule.steps[i].before for i in places[:2])
        if launch < max(member.ready for member in members):
            yield f"bucket {number}: launched at {launch}, before its members are ready"
        if bucket.kind == "gather" and wait > min(problem.gathers[i].first_use for i in bucket.members):
            yield f"bucket {number}: awaited at {wait}, behind the first use of a member"
    if len(place) != len(schedule.steps) or any(n >= len(schedule.buckets) for n, _ in place):
        yield "steps of a bucket that is not there"
