"""Reads of single parameters outside any program, or for a graph that runs uncompiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphshard.following.follower import Follower
from graphshard.fsdp2 import Unit
from graphshard.reporting.report import ProgramRecord
from graphshard.state.calls import Call
from graphshard.state.shards import Shard
from graphshard.state.unit_programs import UnitPrograms


class OutsideGathers:
    """Serves one parameter at a time, gathered once per forward.

    Args:
        programs: make and count the collectives.
        active: units that hold something.
        backward_runs: is called by each backward.
        follower: knows what other ranks do meanwhile.
    """

    def __init__(
        self, programs: UnitPrograms, active: set[Unit], backward_runs: Callable[[], None], follower: Follower
    ) -> None:
        self._programs = programs
        self._active = active
        self._backward_runs = backward_runs
        self._follower = follower
        self._gathered: dict[tuple[int, bool], Tensor] = {}

    def clear(self) -> None:
        """Frees what was gathered: the forward has ended."""
        self._gathered.clear()

    def gather(
        self, shard: Shard, keep: bool, forward: ProgramRecord | None = None, backward: ProgramRecord | None = None
    ) -> Tensor:
        """One parameter, full size.

        Args:
            shard: the parameter.
            keep: serve it again until `clear`.
            forward: counts its gathers; None: a record of its own does.
            backward: counts its reductions likewise.
        """
        key = (id(shard), torch.is_grad_enabled())
        if (full := self._gathered.get(key)) is None:
            self._follower.reads_outside(shard)
            gathered: Tensor = _Gather.apply(shard.leaf, shard, self, forward, backward)  # type: ignore[no-untyped-call]
            if (node := gathered.grad_fn) is not None:
                node.call = self._follower.outside_call(shard, node)  # type: ignore[attr-defined]
            full = gathered
            if keep:
                self._gathered[key] = full
        return full

    def run_forward(self, shard: Shard, record: ProgramRecord | None) -> Tensor:
        """Gathers, or takes what stays gathered."""
        full = shard.full
        if full is None:
            full = self._programs.launch_gather([shard], record).wait()[0]
        return full.data  # the same memory, but no view: a forward may write into it

    def run_backward(self, shard: Shard, grad: Tensor, call: Call | None, record: ProgramRecord | None) -> None:
        """Does with a gradient what the flags say now. `call`: the read, where others are followed in it."""
        self._backward_runs()
        if call is not None:
            self._follower.outside_backward(call)
        shard.hold(grad, shared=True)
        self._active.add(shard.unit)
        if record is None:
            shard.report.eager_reductions[shard.fqn] += 1  # at the end of this backward, with the rest of its unit
        elif shard.unit.reduce_grads and not shard.unit.reduce_unused:
            self._programs.reduce(shard.unit, [shard], record)


class _Gather(torch.autograd.Function):
    """A gather whose backward follows the run-time flags like a program does."""

    @staticmethod
    def forward(
        ctx: Any,
        leaf: Tensor,
        shard: Shard,
        gathers: OutsideGathers,
        forward: ProgramRecord | None,
        backward: ProgramRecord | None,
    ) -> Tensor:
        ctx.state = (shard, gathers, backward)
        if forward is None:
            shard.report.eager_unshards[shard.fqn] += 1
        return gathers.run_forward(shard, forward)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        shard, gathers, record = ctx.state
        gathers.run_backward(shard, grads[0], ctx.call, record)
        return None, None, None, None, None
