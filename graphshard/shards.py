"""Leaves: plain tensors that stand for sharded parameters while a model runs compiled.

A leaf shares storage with FSDP2's padded flat shard, so it has one size on all ranks and optimizer steps show in it.
Autograd puts a reduced gradient on the leaf; a hook hands it on to the DTensor parameter. A leaf also holds what
gradient accumulation has not reduced yet.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphshard.compat import keep_static
from graphshard.fsdp2 import ShardedParam
from graphshard.ir import ParamRef
from graphshard.markers import REDUCE_GRAD, UNSHARD, ShardSpec
from graphshard.report import ProgramRecord, Report


class Shard:
    """One sharded parameter of a compiled model.

    Attributes:
        leaf: flat padded shard `[N]`, a leaf of autograd.
        held: accumulated gradient that is not reduced yet, full size, in the unit's reduce dtype; or None.
    """

    def __init__(self, param: ShardedParam, fqn: str, index: int, report: Report) -> None:
        self.param = param
        self.unit = param.unit
        self.fqn = fqn
        self.index = index
        self.report = report
        self.held: Tensor | None = None
        self._source = param.flat_shard
        self.leaf = self._make_leaf()

    def _make_leaf(self) -> Tensor:
        self._source = self.param.flat_shard
        trainable = self.param.parameter.requires_grad
        leaf = self._source.detach().requires_grad_(trainable)
        keep_static(leaf)
        if trainable:
            leaf.register_post_accumulate_grad_hook(_handing_over(self))  # type: ignore[no-untyped-call]
        return leaf

    def renew(self) -> None:
        """Makes a new leaf if the parameter's storage or `requires_grad` changed: `to(dtype)`,
        `load_state_dict(assign=True)`.

        Raises:
            RuntimeError: if an unreduced gradient of another dtype or size is held.
        """
        if self.param.flat_shard is self._source and self.param.parameter.requires_grad == self.leaf.requires_grad:
            return
        if self.held is not None:
            raise RuntimeError(
                f"{self.fqn}: its parameter changed while an unreduced gradient was held; run one backward with "
                "set_requires_gradient_sync(True) before"
            )
        self.leaf = self._make_leaf()

    def marker_args(self) -> tuple[Tensor, str]:
        """Arguments of `graphshard::unshard` for this parameter."""
        return self.leaf, str(self.spec())

    def spec(self) -> ShardSpec:
        """How this parameter is sharded, as FSDP2's settings stand now."""
        param, unit = self.param, self.unit
        return ShardSpec(
            param.size,
            param.param_dtype,
            param.reduce_dtype,
            unit.world_size,
            unit.group_name,
            unit.reshard_after_forward,
        )

    def ref(self) -> ParamRef:
        """What passes may know of this parameter."""
        return ParamRef(
            self.fqn,
            self.unit.name,
            self.index,
            self.param.size,
            self.leaf.numel(),
            self.param.parameter.dtype,
            self.param.adds_in_reduce_dtype,
        )

    def hold(self, grad: Tensor, shared: bool) -> None:
        """Accumulates an unreduced gradient, as FSDP2 does: the first in the reduce dtype, then added in place.

        Args:
            grad: full gradient.
            shared: whether something else may hold memory of `grad`.
        """
        if self.held is None:
            held = grad.to(self.param.reduce_dtype)
            self.held = held.clone() if held is grad and shared else held
        else:
            self.held += grad.to(self.param.reduce_dtype) if self.param.adds_in_reduce_dtype else grad

    def reduce(self, grad: Tensor) -> Tensor:
        """Reduces a full gradient by a collective of its own; returns the flat shard `[N]`."""
        flat: Tensor = REDUCE_GRAD(grad, self.leaf.detach(), str(self.spec()))
        return flat

    def reduce_held(self) -> None:
        """Reduces what is held and puts it on the parameter."""
        if self.held is not None:
            held, self.held = self.held, None
            self.report.eager_reductions[self.fqn] += 1
            self.param.deliver_grad(self.reduce(held))


def _handing_over(shard: Shard) -> Callable[[Tensor], None]:
    """The gradient hook of a leaf. It does not keep the shard alive: Python cannot see a cycle through a tensor's
    hooks.
    """
    shard_of = weakref.ref(shard)

    def hand_over(leaf: Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        shard = shard_of()
        if grad is not None and shard is not None:  # None: the program left it unreduced, or none flowed
            shard.param.deliver_grad(grad)

    return hand_over


def gather_eagerly(shard: Shard, record: ProgramRecord | None, backward_runs: Callable[[], None]) -> Tensor:
    """Gathers one parameter, outside any program or for a graph that runs uncompiled.

    Args:
        shard: the parameter.
        record: counts its reductions; None: they count as reductions outside programs.
        backward_runs: is called by backward.
    """
    full: Tensor = _EagerUnshard.apply(shard.leaf, shard, record, backward_runs)  # type: ignore[no-untyped-call]
    return full


class _EagerUnshard(torch.autograd.Function):
    """A gather whose backward follows the run-time flags like a program does."""

    @staticmethod
    def forward(
        ctx: Any, leaf: Tensor, shard: Shard, record: ProgramRecord | None, backward_runs: Callable[[], None]
    ) -> Tensor:
        ctx.state = (shard, record, backward_runs)
        full: Tensor = UNSHARD(*shard.marker_args())
        return full

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        shard, record, backward_runs = ctx.state
        (grad,) = grads
        backward_runs()
        nothing = (None, None, None)
        if not shard.unit.reduce_grads:
            shard.hold(grad, shared=True)
            return None, *nothing
        if shard.held is not None:
            shard.hold(grad, shared=True)
            grad, shard.held = shard.held, None
        if record is not None:
            record.runs += 1
        else:
            shard.report.eager_reductions[shard.fqn] += 1
        return shard.reduce(grad), *nothing
