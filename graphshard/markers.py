"""The two marker operators that stand for a gather and a reduction while a model is traced.

``graphshard::unshard`` yields a full parameter from the flat shard of this rank; its gradient is ``graphshard::reduce_grad``.
Dynamo and AOTAutograd trace both as single opaque nodes, so that passes know which shard every gather and every gradient belongs
to. The shard is the identity: no name or index is a constant in the trace, and one traced region serves equal blocks.

The operators run as they are, too, one parameter at a time: that is the meaning a lowered program must keep.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

_LIBRARY = torch.library.Library("graphshard", "DEF")
_LIBRARY.define(
    "unshard(Tensor shard, SymInt[] size, ScalarType dtype, ScalarType reduce_dtype, int world_size, str group, bool reshard) -> Tensor"
)
_LIBRARY.define(
    "reduce_grad(Tensor grad, Tensor shard, ScalarType reduce_dtype, int world_size, str group) -> Tensor"
)


class ReduceOps(NamedTuple):
    """How eager FSDP2 averages gradients of a dtype: divide, reduce with `op`, divide again (None: no division)."""

    predivide: float | None
    op: str
    postdivide: float | None


def reduce_ops(reduce_dtype: torch.dtype, world_size: int) -> ReduceOps:
    """Returns FSDP2's reduction for `world_size` data-parallel ranks.

    fp32 and bf16 do not overflow: the communication library averages. Other dtypes are divided by about sqrt(N) before and after
    a sum. One rank divides nothing. Source: eager-semantics of FSDP2's `_get_gradient_divide_factors`.
    """
    if reduce_dtype in (torch.float32, torch.bfloat16):
        return ReduceOps(None, "avg" if world_size > 1 else "sum", None)
    predivide = 1
    while world_size % predivide == 0 and world_size / predivide > predivide:
        predivide *= 2
    return ReduceOps(float(predivide), "sum", world_size / predivide)


def padded_shape(size: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Shape of a full parameter whose dim 0 is padded so that all `world_size` shards are equal."""
    return (math.ceil(size[0] / world_size) * world_size, *size[1:])


def _unshard(
    shard: Tensor,
    size: Sequence[int],
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    world_size: int,
    group: str,
    reshard: bool,
) -> Tensor:
    """`shard`: flat padded `[N]`, any dtype; returns a fresh contiguous tensor of `size` and `dtype`."""
    local = shard.to(dtype)
    if world_size == 1:
        return local.view(size).clone() if local is shard else local.view(size)
    full = local.new_empty(local.numel() * world_size)
    dist.all_gather_into_tensor(full, local, group=_process_group(group))
    full = full.view(padded_shape(size, world_size))
    return full if full.shape[0] == size[0] else full[: size[0]].clone()


def _reduce_grad(grad: Tensor, shard: Tensor, reduce_dtype: torch.dtype, world_size: int, group: str) -> Tensor:
    """`grad`: full gradient; `shard` says whose it is, and its dtype and length `[N]`; returns the averaged shard `[N]`."""
    ops = reduce_ops(reduce_dtype, world_size)
    flat = grad.to(reduce_dtype).reshape(-1)
    flat = F.pad(flat, (0, shard.numel() * world_size - flat.numel()))
    flat = flat / ops.predivide if ops.predivide not in (None, 1.0) else flat
    if world_size > 1:
        op = dist.ReduceOp.AVG if ops.op == "avg" else dist.ReduceOp.SUM
        reduced = flat.new_empty(shard.numel())
        dist.reduce_scatter_tensor(reduced, flat, op=op, group=_process_group(group))
    else:
        reduced = flat.clone()
    reduced = reduced / ops.postdivide if ops.postdivide not in (None, 1.0) else reduced
    return reduced.to(shard.dtype)


def _process_group(name: str) -> dist.ProcessGroup:
    from graphshard.compat import resolve_process_group

    return resolve_process_group(name)


# CompositeExplicitAutograd: a CompositeImplicit body would be decomposed while tracing.
_LIBRARY.impl("unshard", _unshard, "CompositeExplicitAutograd")
_LIBRARY.impl("reduce_grad", _reduce_grad, "CompositeExplicitAutograd")

UNSHARD = torch.ops.graphshard.unshard.default
REDUCE_GRAD = torch.ops.graphshard.reduce_grad.default


@torch.library.register_fake("graphshard::unshard", lib=_LIBRARY)
def _unshard_fake(shard: Tensor, size: Sequence[int], dtype: torch.dtype, *_: Any) -> Tensor:
    return shard.new_empty(size, dtype=dtype)


@torch.library.register_fake("graphshard::reduce_grad", lib=_LIBRARY)
def _reduce_grad_fake(grad: Tensor, shard: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(shard)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    shard, _, _, reduce_dtype, world_size, group, _ = inputs
    ctx.save_for_backward(shard)
    ctx.reduction = (reduce_dtype, world_size, group)


def _unshard_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (REDUCE_GRAD(grad, ctx.saved_tensors[0], *ctx.reduction), None, None, None, None, None, None)


def _refuse_double_backward(ctx: Any, grad: Tensor) -> Any:
    raise NotImplementedError(
        "graphshard::reduce_grad: a gradient of a gradient was asked for (create_graph=True); reductions are differentiated once. "
        "Use `with graphshard.eager(model):` for this call."
    )


torch.library.register_autograd("graphshard::unshard", _unshard_backward, setup_context=_setup_context, lib=_LIBRARY)
torch.library.register_autograd("graphshard::reduce_grad", _refuse_double_backward, lib=_LIBRARY)
