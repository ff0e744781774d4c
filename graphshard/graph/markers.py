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
from torch import Tensor

from graphshard.compat.groups import resolve_process_group
from graphshard.compat.running_trace import note_read

_LIBRARY: Any = torch.library.Library("graphshard", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("unshard(Tensor shard, str spec, Tensor? wire=None) -> Tensor")
_LIBRARY.define("reduce_grad(Tensor grad, Tensor shard, str spec) -> Tensor")


@dataclass(frozen=True)
class ShardSpec:
    """How a parameter is sharded: everything about a marker that is not a tensor.

    Attributes:
        size: full shape of the parameter; on a tensor-parallel mesh of this rank's part.
        dtype: of the gathered parameter.
        reduce_dtype: in which gradients are reduced.
        dim: that is sharded.
        world_size: number of shards; 1 where parameters are replicated only.
        group: name of the process group of the shards, ``""`` if there is none.
        replicas: number of copies of each shard.
        replicate_group: name of the process group of the copies, ``""`` if there is none.
        device: type of the device of the gathered parameter, where the shard is offloaded from it.
    """

    size: tuple[int, ...]
    dtype: torch.dtype
    reduce_dtype: torch.dtype
    dim: int
    world_size: int
    group: str
    replicas: int = 1
    replicate_group: str = ""
    device: str = ""

    def __str__(self) -> str:
        """As markers carry it: ``bfloat16 1024x256|reduce float32|dim 0|2 of 0``, then ``|4 of 1`` for copies, and
        ``|on cuda``.
        """
        dtype, reduce_dtype = (str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.reduce_dtype))
        size = "x".join(map(str, self.size))
        text = f"{dtype} {size}|reduce {reduce_dtype}|dim {self.dim}|{self.world_size} of {self.group}"
        if self.replicate_group:
            text += f"|{self.replicas} of {self.replicate_group}"
        return f"{text}|on {self.device}" if self.device else text

    @staticmethod
    @cache
    def parse(text: str) -> ShardSpec:
        """The inverse of `str`."""
        param, reduce_dtype, dim, group, *rest = text.split("|")
        dtype, size = param.split(" ")
        world_size, _, name = group.split(" ", 2)
        device = rest.pop().removeprefix("on ") if rest and rest[-1].startswith("on ") else ""
        replicas, _, replicate_group = rest[0].split(" ", 2) if rest else ("1", "of", "")
        return ShardSpec(
            tuple(int(numel) for numel in size.split("x")),
            getattr(torch, dtype),
            getattr(torch, reduce_dtype.removeprefix("reduce ")),
            int(dim.removeprefix("dim ")),
            int(world_size),
            name,
            int(replicas),
            replicate_group,
            device,
        )

    @property
    def ranks(self) -> int:
        """Number of ranks that gradients are averaged over."""
        return self.world_size * self.replicas


class ReduceOps(NamedTuple):
    """How eager FSDP2 averages gradients: scale, reduce-scatter, all-reduce, divide (None: no scaling).

    Attributes:
        predivide: divides what is reduced.
        premultiply: multiplies it instead: what the communication library's PREMUL_SUM does.
        scatter: operator of the reduce-scatter.
        reduce: operator of the all-reduce behind it.
        postdivide: divides the result.
    """

    predivide: float | None
    premultiply: float | None
    scatter: str
    reduce: str
    postdivide: float | None


def reduce_ops(
    reduce_dtype: torch.dtype,
    world_size: int,
    replicas: int = 1,
    divide_factor: float | None = None,
    force_sum: bool = False,
) -> ReduceOps:
    """Returns FSDP2's reduction over `world_size` shards and `replicas` copies of each.

    fp32 and bf16 do not overflow: the communication library averages. Other dtypes are divided by about sqrt(N) before
    and after a sum. One rank divides nothing, except by a factor that was asked for. Source: eager-semantics of
    FSDP2's `_get_gradient_divide_factors`.

    Args:
        reduce_dtype: of what is reduced.
        world_size: number of shards.
        replicas: number of copies of each.
        divide_factor: of `set_gradient_divide_factor`, in place of the number of ranks.
        force_sum: of `set_force_sum_reduction_for_comms`: sum, then divide.
    """
    ranks = world_size * replicas
    # Without a reduce-scatter FSDP2 divides by a factor that was asked for where the reduce-scatter would be.
    alone = divide_factor if world_size == 1 else None
    if reduce_dtype in (torch.float32, torch.bfloat16) and not force_sum:
        if divide_factor is None:
            op = "avg" if ranks > 1 else "sum"
            return ReduceOps(None, None, op, op, None)
        if divide_factor == world_size or world_size == 1:
            return ReduceOps(alone, None, "avg", "sum", None)
        return ReduceOps(None, 1 / divide_factor, "sum", "sum", None)
    factor = float(ranks) if divide_factor is None else divide_factor
    predivide = 1
    if reduce_dtype not in (torch.float32, torch.bfloat16):
        while factor % predivide == 0 and factor / predivide > predivide:
            predivide *= 2
    before, after = predivide * (alone or 1), factor / predivide
    return ReduceOps(float(before) if before != 1 else None, None, "sum", "sum", after if after != 1 else None)


def padded_shape(size: Sequence[int], world_size: int, dim: int = 0) -> tuple[int, ...]:
    """Shape of a full parameter whose `dim` is padded so that all `world_size` shards are equal."""
    return (*size[:dim], math.ceil(size[dim] / world_size) * world_size, *size[dim + 1 :])


def _unshard(shard: Tensor, spec: str, wire: Tensor | None = None) -> Tensor:
    """`shard`: flat padded `[N]`, any dtype; returns a fresh contiguous tensor of the spec's size and dtype. `wire`: is
    gathered in its place, and then `shard` says only whose it is.
    """
    to = ShardSpec.parse(spec)
    shard = shard if wire is None else wire
    local = shard.to(to.device or shard.device, to.dtype)
    if to.world_size == 1:
        return local.view(to.size).clone() if local is shard else local.view(to.size)
    full = local.new_empty(local.numel() * to.world_size)
    dist.all_gather_into_tensor(full, local, group=resolve_process_group(to.group))
    padded = padded_shape(to.size, to.world_size, to.dim)
    part = [*padded[: to.dim], padded[to.dim] // to.world_size, *padded[to.dim + 1 :]]
    full = full.view(to.world_size, *part).movedim(0, to.dim).reshape(padded)
    return full if padded == to.size else full.narrow(to.dim, 0, to.size[to.dim]).clone()


def _reduce_grad(grad: Tensor, shard: Tensor, spec: str) -> Tensor:
    """`grad`: full gradient; `shard` says whose it is, and its dtype and length `[N]`; returns the averaged shard
    `[N]`.
    """
    of = ShardSpec.parse(spec)
    ops = reduce_ops(of.reduce_dtype, of.world_size, of.replicas)
    padded = padded_shape(of.size, of.world_size, of.dim)
    flat = grad.new_zeros(padded, dtype=of.reduce_dtype)
    flat.narrow(of.dim, 0, of.size[of.dim]).copy_(grad)
    flat = flat.view(*padded[: of.dim], of.world_size, -1, *padded[of.dim + 1 :]).movedim(of.dim, 0).reshape(-1)
    flat = flat if ops.predivide is None else flat / ops.predivide
    if of.world_size > 1:
        reduced = flat.new_empty(shard.numel())
        group = resolve_process_group(of.group)
        dist.reduce_scatter_tensor(reduced, flat, op=_OPERATORS[ops.scatter], group=group)
    else:
        reduced = flat.clone()
    if of.replicas > 1:
        dist.all_reduce(reduced, op=_OPERATORS[ops.reduce], group=resolve_process_group(of.replicate_group))
    reduced = reduced if ops.postdivide is None else reduced / ops.postdivide
    result: Tensor = reduced.to(shard.device, shard.dtype)
    return result


_OPERATORS = {"avg": dist.ReduceOp.AVG, "sum": dist.ReduceOp.SUM}

# CompositeExplicitAutograd: a CompositeImplicit body would be decomposed while tracing.
_LIBRARY.impl("unshard", _unshard, "CompositeExplicitAutograd")
_LIBRARY.impl("reduce_grad", _reduce_grad, "CompositeExplicitAutograd")

UNSHARD = torch.ops.graphshard.unshard.default
REDUCE_GRAD = torch.ops.graphshard.reduce_grad.default


def _unshard_fake(shard: Tensor, spec: str, wire: Tensor | None = None) -> Tensor:
    note_read()
    to = ShardSpec.parse(spec)
    return shard.new_empty(to.size, dtype=to.dtype, device=to.device or (shard if wire is None else wire).device)


def _reduce_grad_fake(grad: Tensor, shard: Tensor, spec: str) -> Tensor:
    return torch.empty_like(shard)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    shard, ctx.spec, _ = inputs
    ctx.save_for_backward(shard)


def _unshard_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return REDUCE_GRAD(grad, ctx.saved_tensors[0], ctx.spec), None, None


def _refuse_double_backward(ctx: Any, grad: Tensor) -> Any:
    raise NotImplementedError(
        "graphshard::reduce_grad: a gradient of a gradient was asked for (create_graph=True); reductions are "
        "differentiated once, as FSDP2's are"
    )


torch.library.register_fake("graphshard::unshard", _unshard_fake, lib=_LIBRARY)
torch.library.register_fake("graphshard::reduce_grad", _reduce_grad_fake, lib=_LIBRARY)
torch.library.register_autograd("graphshard::unshard", _unshard_backward, setup_context=_setup_context, lib=_LIBRARY)
torch.library.register_autograd("graphshard::reduce_grad", _refuse_double_backward, lib=_LIBRARY)
