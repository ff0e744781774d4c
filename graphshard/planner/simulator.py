"""Runs a schedule on paper: one stream of computation, and one stream for each process group.

A collective starts when it has been launched and the one before it on its stream is done. A wait holds the computation
until its collective is done. While any collective is under way the computation runs at the rate 1 / (1 + contention).
Memory follows the order of the program, not the clock: allocators hand it out when an operation is issued. A
collective's input is held until its wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from graphshard.planner.memory import Memory
from graphshard.planner.problem import (
    OwnCollective,
    Problem,
    ReductionTask,
    copy_in_us,
    copy_out_us,
    then_us,
    transfer_us,
)
from graphshard.planner.schedule import Schedule, ScheduledStep, StepKind

Reason = Literal["hidden", "head", "tail", "queue", "late", "own"]


class Event(NamedTuple):
    """Something that takes time. `stream`: -1 for the computation. `bucket`: -1 for none."""

    stream: int
    what: Literal["compute", "copy_in", "copy_out", "collective", "exposed"]
    bucket: int
    start_us: float
    end_us: float
    position: int


@dataclass(frozen=True)
class Exposure:
    """How long the computation waits for one collective, and why.

    Attributes:
        bucket: index of the bucket, or of the model's own collective where `reason` is ``"own"``.
        exposed_us: time that the computation waits.
        reason: ``"hidden"``: not at all. ``"head"``: nothing is computed before it. ``"tail"``: nothing is computed
            behind its launch. ``"queue"``: it started late, behind another on its stream. ``"late"``: it was
            launched too late.
        behind: the bucket that it queued behind, -1 for none.
    """

    bucket: int
    exposed_us: float
    reason: Reason
    behind: int = -1


@dataclass(frozen=True)
class Simulation:
    """What a schedule takes.

    Attributes:
        step_us: from the first launch to the end of the last.
        exposures: of every bucket, in order of their waits, then of the model's own collectives.
        events: in order of start, per stream.
        live_bytes: what is allocated at most at each position, the end included.
    """

    step_us: float
    exposures: tuple[Exposure, ...]
    events: tuple[Event, ...]
    live_bytes: tuple[int, ...]

    @property
    def exposed_us(self) -> float:
        """Time that the computation waits."""
        return sum(exposure.exposed_us for exposure in self.exposures)

    @property
    def peak_bytes(self) -> int:
        """Most that is allocated."""
        return max(self.live_bytes)


def computed_until(now_us: float, work_us: float, busy_until_us: float, contention: float) -> float:
    """When `work_us` of computation that starts now is done, if collectives are under way until `busy_until_us`."""
    if contention == 0.0 or now_us >= busy_until_us:
        return now_us + work_us
    slowed_us = work_us * (1.0 + contention)
    if now_us + slowed_us <= busy_until_us:
        return now_us + slowed_us
    return busy_until_us + work_us - (busy_until_us - now_us) / (1.0 + contention)


def simulate(problem: Problem, schedule: Schedule) -> Simulation:
    """Runs `schedule`, which must be one for `problem` (see `check_schedule`)."""
    return _Simulator(problem, schedule).run()


class _Simulator:
    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        self.problem, self.schedule = problem, schedule
        self.now_us = 0.0
        self.free_us = [0.0] * len(problem.streams)
        self.last_on = [-1] * len(problem.streams)
        self.end_us: dict[tuple[int, StepKind], float] = {}
        self.launched: dict[tuple[int, StepKind], tuple[float, float, int, int]] = {}
        self.events: list[Event] = []
        self.exposures: list[Exposure] = []
        self.members = [schedule.members(problem, i) for i in range(len(schedule.buckets))]
        self.memory = Memory(problem, self.members)

    def run(self) -> Simulation:
        problem = self.problem
        steps = iter(self.schedule.steps)
        step = next(steps, None)
        own_launches, own_waits = iter(problem.own), iter(sorted(problem.own, key=lambda c: c.wait))
        to_launch, to_wait = next(own_launches, None), next(own_waits, None)
        own_ends: dict[str, float] = {}
        own: list[Exposure] = []
        for position in range(len(problem.ops) + 1):
            while step is not None and step.before == position:
                self._take(step)
                step = next(steps, None)
            while to_launch is not None and to_launch.launch == position:
                own_ends[to_launch.name] = self._start(to_launch.stream, to_launch.us, -1, position)[1]
                to_launch = next(own_launches, None)
            while to_wait is not None and to_wait.wait == position:
                own.append(self._wait_own(to_wait, own_ends[to_wait.name]))
                to_wait = next(own_waits, None)
            if position < len(problem.ops):
                self._compute("compute", problem.op_us[position], -1, position)
            self.memory.end_of(position)
        end_us = max([self.now_us, *self.free_us])
        return Simulation(end_us, (*self.exposures, *own), tuple(self.events), tuple(self.memory.most))

    def _take(self, step: ScheduledStep) -> None:
        bucket, members = step.bucket, self.members[step.bucket]
        if step.kind == "launch":
            self.memory.launch(bucket, step.before)
            self._compute("copy_in", copy_in_us(members) + self.problem.launch_us, bucket, step.before)
            self._launch(bucket, "launch", members[0].transfer.stream, transfer_us(members), step.before)
            return
        self._wait(bucket, "launch" if step.kind == "wait" else "wait", step.before)
        self.memory.wait(bucket, step.kind, step.before)
        if step.kind == "wait" and isinstance(members[0], ReductionTask) and members[0].then is not None:
            self._compute("copy_in", self.problem.launch_us, bucket, step.before)
            reduced: Sequence[ReductionTask] = members  # type: ignore[assignment]
            self._launch(bucket, "wait", members[0].then.stream, then_us(reduced), step.before)
        else:
            self._compute("copy_out", copy_out_us(members), bucket, step.before)

    def _compute(self, what: Literal["compute", "copy_in", "copy_out"], work_us: float, bucket: int, at: int) -> None:
        if work_us:
            start = self.now_us
            self.now_us = computed_until(start, work_us, max(self.free_us, default=0.0), self.problem.contention)
            self.events.append(Event(-1, what, bucket, start, self.now_us, at))

    def _start(self, stream: int, us: float, bucket: int, at: int) -> tuple[float, float]:
        start = max(self.now_us, self.free_us[stream])
        self.free_us[stream] = start + us
        self.events.append(Event(stream, "collective", bucket, start, start + us, at))
        return start, start + us

    def _launch(self, bucket: int, kind: StepKind, stream: int, us: float, at: int) -> None:
        before, launched_us = self.last_on[stream], self.now_us
        start, self.end_us[bucket, kind] = self._start(stream, us, bucket, at)
        self.launched[bucket, kind] = (launched_us, start, at, before)
        self.last_on[stream] = bucket

    def _wait(self, bucket: int, kind: StepKind, at: int) -> None:
        exposed_us = max(0.0, self.end_us[bucket, kind] - self.now_us)
        launched_us, start_us, launched_at, before = self.launched[bucket, kind]
        reason: Reason = "hidden"
        if exposed_us:
            self.events.append(Event(-1, "exposed", bucket, self.now_us, self.now_us + exposed_us, at))
            computed = self.problem.elapsed_us
            if computed[at] == 0.0:
                reason = "head"
            elif computed[launched_at] == computed[-1]:
                reason = "tail"
            else:
                reason = "queue" if start_us > launched_us else "late"
        self.exposures.append(Exposure(bucket, exposed_us, reason, before if reason == "queue" else -1))
        self.now_us += exposed_us

    def _wait_own(self, own: OwnCollective, end_us: float) -> Exposure:
        exposed_us = max(0.0, end_us - self.now_us)
        if exposed_us:
            self.events.append(Event(-1, "exposed", -1, self.now_us, self.now_us + exposed_us, own.wait))
        self.now_us += exposed_us
        return Exposure(self.problem.own.index(own), exposed_us, "own" if exposed_us else "hidden")
