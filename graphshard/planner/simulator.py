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

from graphshard.planner.problem import (
    Gather,
    OwnCollective,
    Problem,
    Reduction,
    copy_in_us,
    copy_out_us,
    then_us,
    transfer_us,
)
from graphshard.planner.schedule import Action, Schedule

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
    return _Run(problem, schedule).run()


class _Run:
    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        self.problem, self.schedule = problem, schedule
        self.now_us = 0.0
        self.free_us = [0.0] * len(problem.streams)
        self.last_on = [-1] * len(problem.streams)
        self.end_us: dict[tuple[int, str], float] = {}
        self.launched: dict[tuple[int, str], tuple[float, float, int, int]] = {}
        self.events: list[Event] = []
        self.exposures: list[Exposure] = []
        self.members = [schedule.members(problem, i) for i in range(len(schedule.buckets))]
        self.memory = _Memory(problem, self.members)

    def run(self) -> Simulation:
        problem = self.problem
        actions = iter(self.schedule.actions)
        action = next(actions, None)
        own_launches, own_waits = iter(problem.own), iter(sorted(problem.own, key=lambda c: c.wait))
        to_launch, to_wait = next(own_launches, None), next(own_waits, None)
        own_ends: dict[str, float] = {}
        own: list[Exposure] = []
        for position in range(len(problem.ops) + 1):
            while action is not None and action.before == position:
                self._act(action)
                action = next(actions, None)
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

    def _act(self, action: Action) -> None:
        bucket, members = action.bucket, self.members[action.bucket]
        if action.step == "launch":
            self.memory.launch(bucket, action.before)
            self._compute("copy_in", copy_in_us(members) + self.problem.launch_us, bucket, action.before)
            self._launch(bucket, "launch", members[0].transfer.stream, transfer_us(members), action.before)
            return
        self._wait(bucket, "launch" if action.step == "wait" else "wait", action.before)
        self.memory.wait(bucket, action.step, action.before)
        if action.step == "wait" and isinstance(members[0], Reduction) and members[0].then is not None:
            self._compute("copy_in", self.problem.launch_us, bucket, action.before)
            reduced: Sequence[Reduction] = members  # type: ignore[assignment]
            self._launch(bucket, "wait", members[0].then.stream, then_us(reduced), action.before)
        else:
            self._compute("copy_out", copy_out_us(members), bucket, action.before)

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

    def _launch(self, bucket: int, step: str, stream: int, us: float, at: int) -> None:
        before, launched_us = self.last_on[stream], self.now_us
        start, self.end_us[bucket, step] = self._start(stream, us, bucket, at)
        self.launched[bucket, step] = (launched_us, start, at, before)
        self.last_on[stream] = bucket

    def _wait(self, bucket: int, step: str, at: int) -> None:
        exposed_us = max(0.0, self.end_us[bucket, step] - self.now_us)
        launched_us, start_us, launched_at, before = self.launched[bucket, step]
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


class _Memory:
    """What is allocated besides `op_bytes`, in program order."""

    def __init__(self, problem: Problem, members: Sequence[Sequence[Gather] | Sequence[Reduction]]) -> None:
        self.problem, self.members = problem, members
        self.live = 0
        self.most = [*problem.op_bytes, problem.op_bytes[-1] if problem.op_bytes else 0]
        # Behind the op of each position: what gradients come alive while it runs, what is free behind it.
        self.grads = [0] * (len(problem.ops) + 1)
        for reduction in problem.reductions:
            self.grads[max(0, reduction.ready - 1)] += reduction.grad_bytes
        self.frees = [0] * (len(problem.ops) + 1)
        self.live += self.grads[0] if not problem.ops else 0

    def _see(self, at: int, extra: int = 0) -> None:
        base = self.problem.op_bytes[min(at, len(self.problem.ops) - 1)] if self.problem.ops else 0
        self.most[at] = max(self.most[at], base + self.live + extra)

    def launch(self, bucket: int, at: int) -> None:
        held, freed = held_by_launch(self.members[bucket])
        self.live += held
        self._see(at)
        self.live -= freed

    def wait(self, bucket: int, step: str, at: int) -> None:
        members = self.members[bucket]
        if isinstance(members[0], Reduction):
            if step == "wait":
                self.live -= freed_by_wait(members)
            self._see(at)
            return
        full = copied_out_bytes(members)
        self._see(at, full)
        self.live += full - freed_by_wait(members)
        for gather in members:
            assert isinstance(gather, Gather)
            kept = gather.full_bytes if len(members) > 1 else gather.alone_out_bytes or gather.wire_bytes
            if gather.last_use < len(self.problem.ops):
                self.frees[max(gather.last_use, at)] += kept

    def end_of(self, at: int) -> None:
        if at < len(self.problem.ops):
            self.live += self.grads[at]
        self._see(at)
        self.live -= self.frees[at]


def held_by_launch(members: Sequence[Gather] | Sequence[Reduction]) -> tuple[int, int]:
    """Bytes that a launch allocates, and those that are free once its copy-in is done."""
    if isinstance(members[0], Reduction):
        shards = sum(member.shard_bytes for member in members)
        grads = sum(member.grad_bytes for member in members if isinstance(member, Reduction))
        if len(members) == 1 and members[0].alone_in_us == 0.0:
            return shards, 0  # the gradient itself is sent: free behind the wait
        return shards + sum(member.wire_bytes for member in members), grads
    copied = len(members) > 1 or members[0].alone_in_us > 0.0
    shards = sum(member.shard_bytes for member in members) if copied else 0
    return sum(member.wire_bytes for member in members) + shards, 0


def freed_by_wait(members: Sequence[Gather] | Sequence[Reduction]) -> int:
    """Bytes that are free once a collective is awaited and copied out: its input, and a buffer that is copied out."""
    if isinstance(members[0], Reduction):
        if len(members) == 1 and members[0].alone_in_us == 0.0:
            return members[0].grad_bytes
        return sum(member.wire_bytes for member in members)
    copied = len(members) > 1 or members[0].alone_in_us > 0.0
    shards = sum(member.shard_bytes for member in members) if copied else 0
    return shards + (sum(member.wire_bytes for member in members) if copied_out_bytes(members) else 0)


def copied_out_bytes(members: Sequence[Gather] | Sequence[Reduction]) -> int:
    """Bytes that a gathered bucket is copied out to."""
    if len(members) > 1:
        return sum(member.full_bytes for member in members if isinstance(member, Gather))
    first = members[0]
    return first.alone_out_bytes if isinstance(first, Gather) else 0
