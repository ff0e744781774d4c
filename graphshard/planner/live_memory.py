"""What is allocated at each position of a program, by what it is for: the split of `Simulation.live_bytes`."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from graphshard.planner.memory import (
    copied_out_bytes,
    freed_by_finish,
    freed_by_wait,
    gathered_bytes,
    held_by_launch,
    scratch_bytes,
    sent_themselves_bytes,
)
from graphshard.planner.problem import GatherTask, Problem, ReductionTask, Tasks, is_flat
from graphshard.planner.schedule import Schedule, ScheduledStep, StepKind


class LiveBytes(NamedTuple):
    """Bytes allocated at one moment.

    Attributes:
        computation_bytes: of the computation itself, `Problem.op_bytes`.
        parameter_bytes: of gathered parameters, from the wait to their last use.
        gradient_bytes: of gradients that are not reduced yet.
        reduced_bytes: of the results of reductions, this rank's shards.
        buffer_bytes: of the inputs and outputs of collectives that are under way or not yet copied out.
    """

    computation_bytes: int
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    reduced_bytes: int = 0
    buffer_bytes: int = 0


def live_by_category(problem: Problem, schedule: Schedule) -> tuple[LiveBytes, ...]:
    """At each position, the end included, the moment at which the most is allocated.

    The sum of an entry is that of `Simulation.live_bytes`.
    """
    steps: dict[int, list[ScheduledStep]] = defaultdict(list)
    for step in schedule.steps:
        steps[step.before].append(step)
    memory = _CategorisedMemory(problem)
    for position in range(len(problem.ops) + 1):
        for step in steps[position]:
            members = schedule.members(problem, step.bucket)
            if step.kind == "launch":
                memory.launch(members, position)
            else:
                memory.wait(members, step.kind, position)
        memory.end_of(position)
    return tuple(memory.most)


class _CategorisedMemory:
    """The rules are the simulator's: memory follows the order of the program."""

    def __init__(self, problem: Problem) -> None:
        self.base = [*problem.op_bytes, problem.op_bytes[-1] if problem.op_bytes else 0]
        self.most = [LiveBytes(base) for base in self.base]
        self.parameters = self.gradients = self.reduced = self.buffers = 0
        ops = len(problem.ops)
        self.grads, self.frees = [0] * (ops + 1), [0] * (ops + 1)
        for reduction in problem.reductions:
            if reduction.ready:
                self.grads[reduction.ready - 1] += reduction.grad_bytes
            else:
                self.gradients += reduction.grad_bytes

    def _see(self, at: int) -> None:
        now = LiveBytes(self.base[at], self.parameters, self.gradients, self.reduced, self.buffers)
        if sum(now) > sum(self.most[at]):
            self.most[at] = now

    def launch(self, members: Tasks, at: int) -> None:
        (held, freed), scratch = held_by_launch(members), scratch_bytes(members)
        results = sum(member.shard_bytes for member in members) if isinstance(members[0], ReductionTask) else 0
        self.reduced += results
        self.buffers += held - results
        self._see(at)
        self.gradients -= freed - scratch
        self.buffers -= scratch

    def wait(self, members: Tasks, kind: StepKind, at: int) -> None:
        freed = freed_by_wait(members)
        if isinstance(members[0], ReductionTask):
            sent_themselves, then = sent_themselves_bytes(members), freed_by_finish(members)
            if kind == "wait":
                self.gradients -= sent_themselves
                self.buffers -= freed - sent_themselves
            else:
                self.buffers -= then
            return
        flat = is_flat(members)
        gathers = [gather for gather in members if isinstance(gather, GatherTask)]
        received = sum(gather.wire_bytes for gather in gathers if not flat and not gather.alone_out_bytes)
        self.buffers -= received
        self.parameters += received + copied_out_bytes(members)
        self._see(at)
        self.buffers -= freed
        for gather in gathers:
            if gather.last_use < len(self.frees) - 1:
                self.frees[max(gather.last_use, at)] += gathered_bytes(gather, flat)

    def end_of(self, at: int) -> None:
        if at < len(self.grads) - 1:
            self.gradients += self.grads[at]
        self._see(at)
        self.parameters -= self.frees[at]
