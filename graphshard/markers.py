"""The two marker operators that stand for a gather and a reduction while a model is traced.

``graphshard::unshard`` yields a full parameter from the flat shard of this rank; its gradient is
``graphshard::reduce_grad``. Dynamo and AOTAutograd trace both as single opaque nodes, so that passes know which shard
every gather and every gradient belongs to. The shard is the identity: no name or index is a constant in the trace, and
one traced region serves equal blocks.

All else about a marker is one string, its `ShardSpec`. Dynamo guards it by one comparison, and never makes its numbers
symbolic.

The operators run as they are, too, one parameter at a time: that is the meaning a lowered program must keep.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from graphshard.compat import resolve_process_group

_LIBRARY: Any = torch.library.Library("graphshard", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("unshard(Tensor shard, str spec) -> Tensor")
_LIBRARY.define("reduce_grad(Tensor grad, Tensor shard, str spec) -> Tensor")


@dataclass(frozen=True)
class ShardSpec:
    """How a parameter is sharded: everything about a marker that is not a tensor.

    Attributes:
        size: full shape of the parameter.
        dtype: of the gathered parameter.
        reduce_dtype: in which gradients are reduced.
        world_size: number of shards.
        group: name of the process group.
        reshard: whether the gathered parameter is freed after forward.
    """

    size: tuple[int, ...]
    dtype: torch.dtype
    reduce_dtype: torch.dtype
    world_size: int
    group: str
    reshard: bool

    def __str__(self) -> str:
        """As markers carry it: ``bfloat16 1024x256|reduce float32|2 of 0|reshard``."""
        dtype, reduce_dtype = (str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.reduce_dtype))
        size = "x".join(map(str, self.size))
        kept = "reshard" if self.reshard else "keep"
        return f"{dtype} {size}|reduce {reduce_dtype}|{self.world_size} of {self.group}|{kept}"

    @staticmethod
    @cache
    def parse(text: str) -> ShardSpec:
        """The inverse of `str`."""
        param, reduce_dtype, group, reshard = text.split("|")
        dtype, size = param.split(" ")
        world_size, _, name = group.split(" ", 2)
        return ShardSpec(
            tuple(int(numel) for numel in size.split("x")),
            getattr(torch, dtype),
            getattr(torch, reduce_dtype.removeprefix("reduce ")),
            int(world_size),
            name,
            reshard == "reshard",
        )


class ReduceOps(NamedTuple):
    """How eager FSDP2 averages gradients of a dtype: divide, reduce with `op`, divide again (None: no division)."""

    predivide: float | None
    op: str
    postdivide: float | None


def reduce_ops(reduce_dtype: torch.dtype, world_size: int) -> ReduceOps:
    """Returns FSDP2's reduction for `world_size` data-parallel ranks.

    fp32 and bf16 do not overflow: the communication library averages. Other dtypes are divided by about sqrt(N) before
    and after a sum. One rank divides nothing. Source: eager-semantics of FSDP2's `_get_gradient_divide_factors`.
    """
    if reduce_dtype in (torch.float32, torch.bfloat16):
        return ReduceOps(None, "avg" if world_size > 1 else "sum", None)
    predivide = 1
    while world_size % predivide == 0 and world_size / predivide > predivide:
        predivide *= 2
    postdivide = world_size / predivide
    return ReduceOps(float(predivide) if predivide > 1 else None, "sum", postdivide if postdivide > 1 else None)


def padded_shape(size: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Shape of a full parameter whose dim 0 is padded so that all `world_size` shards are equal."""
    return (math.ceil(size[0] / world_size) * world_size, *size[1:])


def _unshard(shard: Tensor, spec: str) -> Tensor:
    """`shard`: flat padded `[N]`, any dtype; returns a fresh contiguous tensor of the spec's size and dtype."""
    to = ShardSpec.parse(spec)
    local = shard.to(to.dtype)
    if to.world_size == 1:
        return local.view(to.size).clone() if local is shard else local.view(to.size)
    full = local.new_empty(local.numel() * to.world_size)
    dist.all_gather_into_tensor(full, local, group=resolve_process_group(to.group))
    full = full.view(padded_shape(to.size, to.world_size))
    return full if full.shape[0] == to.size[0] else full[: to.size[0]].clone()


def _reduce_grad(grad: Tensor, shard: Tensor, spec: str) -> Tensor:
    """`grad`: full gradient; `shard` says whose it is, and its dtype and length `[N]`; returns the averaged shard
    `[N]`.
    """
    of = ShardSpec.parse(spec)
    ops = reduce_ops(of.reduce_dtype, of.world_size)
    flat = grad.to(of.reduce_dtype).reshape(-1)
    flat = F.pad(flat, (0, shard.numel() * of.world_size - flat.numel()))
    flat = flat if ops.predivide is None else flat / ops.predivide
    if of.world_size > 1:
        op = dist.ReduceOp.AVG if ops.op == "avg" else dist.ReduceOp.SUM
        reduced = flat.new_empty(shard.numel())
        dist.reduce_scatter_tensor(reduced, flat, op=op, group=resolve_process_group(of.group))
    else:
        reduced = flat.clone()
    reduced = reduced if ops.postdivide is None else reduced / ops.postdivide
    return reduced.to(shard.dtype)


# CompositeExplicitAutograd: a CompositeImplicit body would be decomposed while tracing.
_LIBRARY.impl("unshard", _unshard, "CompositeExplicitAutograd")
_LIBRARY.impl("reduce_grad", _reduce_grad, "CompositeExplicitAutograd")

UNSHARD = torch.ops.graphshard.unshard.default
REDUCE_GRAD = torch.ops.graphshard.reduce_grad.default


def _unshard_fake(shard: Tensor, spec: str) -> Tensor:
    to = ShardSpec.parse(spec)
    return shard.new_empty(to.size, dtype=to.dtype)


def _reduce_grad_fake(grad: Tensor, shard: Tensor, spec: str) -> Tensor:
    return torch.empty_like(shard)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    shard, ctx.spec = inputs
    ctx.save_for_backward(shard)


def _unshard_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return REDUCE_GRAD(grad, ctx.saved_tensors[0], ctx.spec), None


def _refuse_double_backward(ctx: Any, grad: Tensor) -> Any:
    raise NotImplementedError(
        "graphshard::reduce_grad: a gradient of a gradient was asked for (create_graph=True); reductions are "
        "differentiated once. "
        "Use `with graphshard.eager(model):` for this call."
    )


torch.library.register_fake("graphshard::unshard", _unshard_fake, lib=_LIBRARY)
torch.library.register_fake("graphshard::reduce_grad", _reduce_grad_fake, lib=_LIBRARY)
torch.library.register_autograd("graphshard::unshard", _unshard_backward, setup_context=_setup_context, lib=_LIBRARY)
torch.library.register_autograd("graphshard::reduce_grad", _refuse_double_backward, lib=_LIBRARY)
