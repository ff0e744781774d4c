"""What a schedule allocates, in the order of the program, and what one bucket holds.

Allocators hand memory out when an operation is issued, so it follows the order of the program, not the clock. A
collective's input is held until its wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphshard.planner.problem import GatherTask, Problem, ReductionTask, Tasks, is_flat
from graphshard.planner.schedule import StepKind


def held_by_launch(members: Tasks) -> tuple[int, int]:
    """Bytes that a launch allocates, and those that are free once its copy-in is done."""
    flat = is_flat(members)
    scratch = scratch_bytes(members)
    held, freed = scratch, scratch
    for member in members:
        copied = flat or member.alone_in_us > 0.0
        if isinstance(member, ReductionTask):  # where the gradient itself is sent, it is free behind the wait
            held += member.shard_bytes + (member.wire_bytes if copied else 0)
            freed += member.grad_bytes if copied else 0
        else:
            held += member.wire_bytes + (member.shard_bytes if copied else 0)
    return held, freed


def scratch_bytes(members: Tasks) -> int:
    """Bytes that a copy-in allocates besides, until it is done."""
    if is_flat(members):
        return sum(member.scratch_bytes for member in members)
    return sum(
        max(0, member.scratch_bytes - member.wire_bytes)
        for member in members
        if isinstance(member, ReductionTask) and member.alone_in_us > 0.0
    )


def freed_by_wait(members: Tasks) -> int:
    """Bytes that are free once a collective is awaited and copied out: its input, and a buffer that is copied out.

    Less those that the all-reduce behind a reduce-scatter takes.
    """
    flat = is_flat(members)
    freed = 0
    for member in members:
        copied = flat or member.alone_in_us > 0.0
        if isinstance(member, ReductionTask):
            freed += member.wire_bytes if copied else member.grad_bytes
        else:
            freed += member.shard_bytes if copied else 0
            freed += member.wire_bytes if flat or member.alone_out_bytes else 0
    return freed - freed_by_finish(members)


def sent_themselves_bytes(members: Tasks) -> int:
    """Bytes of gradients that no copy is made of to reduce them."""
    if is_flat(members):
        return 0
    return sum(m.grad_bytes for m in members if isinstance(m, ReductionTask) and m.alone_in_us == 0.0)


def freed_by_finish(members: Tasks) -> int:
    """Bytes that are free once the all-reduce behind a reduce-scatter is awaited: its input."""
    first = members[0]
    followed = isinstance(first, ReductionTask) and first.then is not None
    return sum(member.shard_bytes for member in members) if followed else 0


def copied_out_bytes(members: Tasks) -> int:
    """Bytes that a gathered bucket is copied out to."""
    flat = is_flat(members)
    return sum(m.full_bytes if flat else m.alone_out_bytes for m in members if isinstance(m, GatherTask))


def gathered_bytes(gather: GatherTask, flat: bool) -> int:
    """What one gathered parameter holds until its last use."""
    return gather.full_bytes if flat else gather.alone_out_bytes or gather.wire_bytes


class Memory:
    """What is allocated besides `op_bytes`, in program order."""

    def __init__(self, problem: Problem, members: Sequence[Tasks]) -> None:
        self.problem, self.members = problem, members
        self.live = 0
        self.most = [*problem.op_bytes, problem.op_bytes[-1] if problem.op_bytes else 0]
        # Behind the op of each position: what gradients come alive while it runs, what is free behind it.
        self.grads = [0] * (len(problem.ops) + 1)
        for reduction in problem.reductions:
            if reduction.ready:
                self.grads[reduction.ready - 1] += reduction.grad_bytes
            else:
                self.live += reduction.grad_bytes
        self.frees = [0] * (len(problem.ops) + 1)

    def _see(self, at: int, extra: int = 0) -> None:
        base = self.problem.op_bytes[min(at, len(self.problem.ops) - 1)] if self.problem.ops else 0
        self.most[at] = max(self.most[at], base + self.live + extra)

    def launch(self, bucket: int, at: int) -> None:
        held, freed = held_by_launch(self.members[bucket])
        self.live += held
        self._see(at)
        self.live -= freed

    def wait(self, bucket: int, kind: StepKind, at: int) -> None:
        members = self.members[bucket]
        if isinstance(members[0], ReductionTask):
            # Nothing new: there is no more than behind the op before.
            self.live -= freed_by_wait(members) if kind == "wait" else freed_by_finish(members)
            return
        full = copied_out_bytes(members)
        self._see(at, full)
        self.live += full - freed_by_wait(members)
        flat = is_flat(members)
        for gather in members:
            assert isinstance(gather, GatherTask)
            if gather.last_use < len(self.problem.ops):
                self.frees[max(gather.last_use, at)] += gathered_bytes(gather, flat)

    def end_of(self, at: int) -> None:
        if at < len(self.problem.ops):
            self.live += self.grads[at]
        self._see(at)
        self.live -= self.frees[at]
