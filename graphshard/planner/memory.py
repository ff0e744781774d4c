"""What a schedule allocates, in the order of the program, and what one bucket holds.

Allocators hand memory out when an operation is issued, so it follows the order of the program, not the clock. A
collective's input is held until its wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphshard.planner.problem import Gather, Problem, Reduction


def held_by_launch(members: Sequence[Gather] | Sequence[Reduction]) -> tuple[int, int]:
    """Bytes that a launch allocates, and those that are free once its copy-in is done."""
    if isinstance(members[0], Reduction):
        shards = sum(member.shard_bytes for member in members)
        grads = sum(member.grad_bytes for member in members if isinstance(member, Reduction))
        if len(members) == 1 and members[0].alone_in_us == 0.0:
            return shards, 0  # the gradient itself is sent: free behind the wait
        scratch = scratch_bytes(members)
        return shards + sum(member.wire_bytes for member in members) + scratch, grads + scratch
    copied = len(members) > 1 or members[0].alone_in_us > 0.0
    shards = sum(member.shard_bytes for member in members) if copied else 0
    scratch = scratch_bytes(members)
    return sum(member.wire_bytes for member in members) + shards + scratch, scratch


def scratch_bytes(members: Sequence[Gather] | Sequence[Reduction]) -> int:
    """Bytes that a copy-in allocates besides, until it is done."""
    if len(members) > 1:
        return sum(member.scratch_bytes for member in members)
    first = members[0]
    if isinstance(first, Gather) or first.alone_in_us == 0.0:
        return 0
    return max(0, first.scratch_bytes - first.wire_bytes)


def freed_by_wait(members: Sequence[Gather] | Sequence[Reduction]) -> int:
    """Bytes that are free once a collective is awaited and copied out: its input, and a buffer that is copied out.

    Less those that the all-reduce behind a reduce-scatter takes.
    """
    if isinstance(members[0], Reduction):
        sent_itself = len(members) == 1 and members[0].alone_in_us == 0.0
        sent = members[0].grad_bytes if sent_itself else sum(member.wire_bytes for member in members)
        return sent - freed_by_finish(members)
    copied = len(members) > 1 or members[0].alone_in_us > 0.0
    shards = sum(member.shard_bytes for member in members) if copied else 0
    return shards + (sum(member.wire_bytes for member in members) if copied_out_bytes(members) else 0)


def freed_by_finish(members: Sequence[Gather] | Sequence[Reduction]) -> int:
    """Bytes that are free once the all-reduce behind a reduce-scatter is awaited: its input."""
    first = members[0]
    followed = isinstance(first, Reduction) and first.then is not None
    return sum(member.shard_bytes for member in members) if followed else 0


def copied_out_bytes(members: Sequence[Gather] | Sequence[Reduction]) -> int:
    """Bytes that a gathered bucket is copied out to."""
    if len(members) > 1:
        return sum(member.full_bytes for member in members if isinstance(member, Gather))
    first = members[0]
    return first.alone_out_bytes if isinstance(first, Gather) else 0


class Memory:
    """What is allocated besides `op_bytes`, in program order."""

    def __init__(self, problem: Problem, members: Sequence[Sequence[Gather] | Sequence[Reduction]]) -> None:
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

    def wait(self, bucket: int, step: str, at: int) -> None:
        members = self.members[bucket]
        if isinstance(members[0], Reduction):
            # Nothing new: there is no more than behind the op before.
            self.live -= freed_by_wait(members) if step == "wait" else freed_by_finish(members)
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
