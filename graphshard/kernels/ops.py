"""The copies as operators of torch: Triton on CUDA, torch's own operators elsewhere.

    graphshard::gather_copy_in(Tensor[] shards, str dtypes) -> Tensor
        `[sum of N]`: shards `[N]`, each cast to its dtype, one behind the other; in bytes (uint8) where dtypes differ.
    graphshard::gather_copy_out(Tensor flat, str members, int world_size) -> Tensor[]
        whole parameters, contiguous and without padding, from `[W * sum of N]`.
    graphshard::reduce_copy_in(
        Tensor[] grads, int[] dims, int world_size, ScalarType dtype, float? multiplier, float? divisor
    ) -> Tensor
        `[W * sum of N]`: gradients cast to `dtype`, padded, cut into rows of shards; multiplied or divided.

Dtypes and members are texts: ``"bfloat16,float32"``, ``"31x16@0:bfloat16,4@0:float32"``. Results share memory with no
argument. All check their arguments before anything is launched. Called with dtypes that the kernel does not cast, they
copy as torch does.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphshard.kernels.available import can_copy, warn_once, why_unfused
from graphshard.kernels.segments import Layout, full_layout, shard_layout

_SCHEMAS = {
    "gather_copy_in": "(Tensor[] shards, str dtypes) -> Tensor",
    "gather_copy_out": "(Tensor flat, str members, int world_size) -> Tensor[]",
    "reduce_copy_in": "(Tensor[] grads, int[] dims, int world_size, ScalarType dtype, float? multiplier, "
    "float? divisor) -> Tensor",
}


class Whole(NamedTuple):
    """A parameter to copy out: its size without padding, the dim that it is sharded on, its dtype."""

    size: tuple[int, ...]
    dim: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.size))}@{self.dim}:{str(self.dtype)[6:]}"


@lru_cache(maxsize=1024)
def parse_dtypes(text: str) -> tuple[torch.dtype, ...]:
    """Dtypes of ``"bfloat16,float32"``."""
    return tuple(_dtype(name, "gather_copy_in: dtypes") for name in text.split(","))


def _dtype(name: str, where: str) -> torch.dtype:
    found = getattr(torch, name, None)
    _check(isinstance(found, torch.dtype), where, repr(name), "the name of a dtype, such as 'bfloat16'")
    return found  # type: ignore[return-value]


@lru_cache(maxsize=1024)
def parse_members(text: str) -> tuple[Whole, ...]:
    """Members of ``"31x16@0:bfloat16,4@0:float32"``."""
    found = []
    for member in text.split(","):
        parts = re.fullmatch(r"(\d+(?:x\d+)*)@(\d+):(\w+)", member)
        want = "a size, the dim that is sharded and a dtype, such as '31x16@0:bfloat16'"
        if parts is None or int(parts[2]) > parts[1].count("x"):
            raise ValueError(f"graphshard::gather_copy_out: members: got {member!r}, want {want}")
        found.append(
            Whole(tuple(map(int, parts[1].split("x"))), int(parts[2]), _dtype(parts[3], "gather_copy_out: members"))
        )
    return tuple(found)


@lru_cache(maxsize=1024)
def wire_dtype(dtypes: tuple[torch.dtype, ...]) -> torch.dtype:
    """Of a buffer of members of these dtypes: bytes where they differ."""
    return dtypes[0] if len(set(dtypes)) == 1 else torch.uint8


# -- gather copy-in


def _gather_copy_in(shards: Sequence[Tensor], dtypes: str) -> Tensor:
    wanted = _check_shards(shards, dtypes)
    cast = [shard.to(dtype) for shard, dtype in zip(shards, wanted, strict=True)]
    if wire_dtype(wanted) == torch.uint8:
        cast = [shard.view(torch.uint8) for shard in cast]
    return torch.cat(cast) if len(cast) > 1 else cast[0].clone()


def _gather_copy_in_fused(shards: Sequence[Tensor], dtypes: str) -> Tensor:
    wanted = _check_shards(shards, dtypes)
    wire = wire_dtype(wanted)
    if wire == torch.uint8:  # casts first: what a dtype of its own would write may lie at any byte
        shards = [shard.to(dtype).view(torch.uint8) for shard, dtype in zip(shards, wanted, strict=True)]
    if not _fused(shards, wire):
        return _gather_copy_in(shards, ",".join(str(wire)[6:] for _ in shards))
    layout = shard_layout(tuple([shard.numel() for shard in shards]))
    flat = shards[0].new_empty(layout.row_numel, dtype=wire)
    _copy()(flat, layout, shards, pack=True)
    return flat


def _fake_gather_copy_in(shards: Sequence[Tensor], dtypes: str) -> Tensor:
    wanted = _check_shards(shards, dtypes)
    wire = wire_dtype(wanted)
    per_element = [dtype.itemsize if wire != dtype else 1 for dtype in wanted]
    numel = sum(shard.numel() * size for shard, size in zip(shards, per_element, strict=True))
    return shards[0].new_empty(numel, dtype=wire)


def _check_shards(shards: Sequence[Tensor], dtypes: str) -> tuple[torch.dtype, ...]:
    wanted = parse_dtypes(dtypes)
    _check(len(shards) == len(wanted), "gather_copy_in: dtypes", f"{len(wanted)} for {len(shards)} shards", "one each")
    device = shards[0].device
    for k, shard in enumerate(shards):
        if (
            shard.dim() != 1 or shard.device != device or not shard.is_contiguous()
        ):  # before texts are made, in each step
            where = f"gather_copy_in: shards[{k}]"
            _check(shard.dim() == 1, where, f"shape {tuple(shard.shape)}", "one dim")
            _check_place(shard, shards[0], where)
    return wanted


# -- gather copy-out


def _gather_copy_out(flat: Tensor, members: str, world_size: int) -> list[Tensor]:
    wanted, layout = _check_flat(flat, members, world_size)
    dtypes = tuple(member.dtype for member in wanted)
    factors = [member.dtype.itemsize if wire_dtype(dtypes) != member.dtype else 1 for member in wanted]
    chunks = [segment.chunk * factor for segment, factor in zip(layout.segments, factors, strict=True)]
    parts = flat.view(world_size, sum(chunks)).split_with_sizes(chunks, 1)
    return [_whole(part, member, world_size) for part, member in zip(parts, wanted, strict=True)]


def _whole(part: Tensor, member: Whole, world_size: int) -> Tensor:
    size, dim, dtype = member
    if part.dtype != dtype:
        part = part.clone(memory_format=torch.contiguous_format).view(dtype)  # its bytes may begin anywhere
    length = -(-size[dim] // world_size)
    shards = part.reshape(world_size, *size[:dim], length, *size[dim + 1 :])
    full = shards.movedim(0, dim).reshape(*size[:dim], world_size * length, *size[dim + 1 :])
    return full.narrow(dim, 0, size[dim]).clone(memory_format=torch.contiguous_format)


def _gather_copy_out_fused(flat: Tensor, members: str, world_size: int) -> list[Tensor]:
    wanted, layout = _check_flat(flat, members, world_size)
    if any(member.dtype != flat.dtype for member in wanted):
        return _gather_copy_out(flat, members, world_size)
    full = [flat.new_empty(member.size) for member in wanted]
    if not _fused(full, flat.dtype):
        return _gather_copy_out(flat, members, world_size)
    _copy()(flat, layout, full, pack=False)
    return full


def _fake_gather_copy_out(flat: Tensor, members: str, world_size: int) -> list[Tensor]:
    wanted, _ = _check_flat(flat, members, world_size)
    return [flat.new_empty(member.size, dtype=member.dtype) for member in wanted]


def _check_flat(flat: Tensor, members: str, world_size: int) -> tuple[tuple[Whole, ...], Layout]:
    wanted, layout, wire, numel = _gathered(members, world_size)
    if flat.dtype != wire or flat.shape != (numel,) or not flat.is_contiguous():
        got = f"{str(flat.dtype)[6:]} {tuple(flat.shape)}"
        want = f"{str(wire)[6:]} {(numel,)}, of {members} over {world_size} ranks"
        _check(flat.dtype == wire and flat.shape == (numel,), "gather_copy_out: flat", got, want)
        _check_place(flat, flat, "gather_copy_out: flat")
    return wanted, layout


@lru_cache(maxsize=1024)
def _gathered(members: str, world_size: int) -> tuple[tuple[Whole, ...], Layout, torch.dtype, int]:
    """The members, and the layout, dtype and number of elements of what is gathered for them."""
    wanted = parse_members(members)
    _check(world_size > 0, "gather_copy_out: world_size", str(world_size), "at least 1")
    layout = full_layout(tuple(m.size for m in wanted), tuple(m.dim for m in wanted), world_size)
    wire = wire_dtype(tuple(member.dtype for member in wanted))
    row = sum(
        segment.chunk * (member.dtype.itemsize if wire != member.dtype else 1)
        for segment, member in zip(layout.segments, wanted, strict=True)
    )
    return wanted, layout, wire, row * world_size


# -- reduce copy-in; its scale: multiplier and divisor, one of them None


def _reduce_copy_in(
    grads: Sequence[Tensor], dims: Sequence[int], world_size: int, dtype: torch.dtype, *scale: float | None
) -> Tensor:
    _check_grads(grads, dims, world_size, dtype, *scale)
    multiplier, divisor = scale
    rows = [_rows(grad.to(dtype), dim, world_size) for grad, dim in zip(grads, dims, strict=True)]
    flat = torch.cat(rows, 1).view(-1)
    if multiplier is not None:
        return flat * multiplier
    return flat if divisor is None else flat / divisor


def _rows(grad: Tensor, dim: int, world_size: int) -> Tensor:
    size = tuple(grad.shape)
    length = -(-size[dim] // world_size)
    missing = world_size * length - size[dim]
    if missing:
        grad = torch.nn.functional.pad(grad, [0, 0] * (len(size) - dim - 1) + [0, missing])
    shards = grad.reshape(*size[:dim], world_size, length, *size[dim + 1 :])
    return shards.movedim(dim, 0).reshape(world_size, -1) if grad.numel() else grad.new_empty(world_size, 0)


def _reduce_copy_in_fused(
    grads: Sequence[Tensor], dims: Sequence[int], world_size: int, dtype: torch.dtype, *scale: float | None
) -> Tensor:
    layout = _check_grads(grads, dims, world_size, dtype, *scale)
    if not _fused(grads, dtype, scaled=scale != (None, None)):
        return _reduce_copy_in(grads, dims, world_size, dtype, *scale)
    flat = grads[0].new_empty(layout.rows * layout.row_numel, dtype=dtype)
    multiplier, divisor = scale
    factor = multiplier if divisor is None else _reciprocal(divisor)
    _copy()(flat, layout, [grad.contiguous() for grad in grads], pack=True, scale=factor)
    return flat


@cache
def _reciprocal(divisor: float) -> float:
    """In fp32, as torch's division by a number does it on CUDA."""
    return float(torch.ones((), dtype=torch.float32, device="cpu") / divisor)


def _fake_reduce_copy_in(
    grads: Sequence[Tensor], dims: Sequence[int], world_size: int, dtype: torch.dtype, *scale: float | None
) -> Tensor:
    layout = _check_grads(grads, dims, world_size, dtype, *scale)
    return grads[0].new_empty(layout.rows * layout.row_numel, dtype=dtype)


def _check_grads(
    grads: Sequence[Tensor], dims: Sequence[int], world_size: int, dtype: torch.dtype, *scale: float | None
) -> Layout:
    multiplier, divisor = scale
    scales = dtype.is_floating_point or scale == (None, None)
    _check(scales, "reduce_copy_in: dtype", f"{dtype} with a factor", "a floating-point one")
    _check(len(grads) == len(dims) > 0, "reduce_copy_in: dims", f"{len(dims)} for {len(grads)} gradients", "one each")
    _check(world_size > 0, "reduce_copy_in: world_size", str(world_size), "at least 1")
    _check(multiplier is None or divisor is None, "reduce_copy_in: divisor", f"{divisor} beside a multiplier", "one")
    device = grads[0].device
    for k, (grad, dim) in enumerate(zip(grads, dims, strict=True)):
        if not 0 <= dim < grad.dim() or grad.device != device:
            _check(0 <= dim < grad.dim(), f"reduce_copy_in: dims[{k}]", str(dim), f"a dim of {tuple(grad.shape)}")
            _check_device(grad, grads[0], f"reduce_copy_in: grads[{k}]")
    return full_layout(tuple([grad.shape for grad in grads]), tuple(dims), world_size)


# -- arguments


def _check(right: bool, where: str, got: str, want: str) -> None:
    if not right:
        raise ValueError(f"graphshard::{where}: got {got}, want {want}")


def _check_device(tensor: Tensor, first: Tensor, where: str) -> None:
    _check(tensor.device == first.device, where, f"a tensor on {tensor.device}", f"one on {first.device}, as the first")


def _check_place(tensor: Tensor, first: Tensor, where: str) -> None:
    _check_device(tensor, first, where)
    _check(tensor.is_contiguous(), where, f"strides {tensor.stride()}", "a contiguous tensor")


# -- which of the two


@cache
def _copy() -> Callable[..., None]:
    """The launcher. Imported late: Triton may be missing, and must not be imported before tests choose its mode."""
    launch: Any = importlib.import_module("graphshard.kernels.launch")
    copy: Callable[..., None] = launch.copy
    return copy


def _fused(sides: Sequence[Tensor], flat: torch.dtype, scaled: bool = False) -> bool:
    """Whether the kernel can do it: dtypes that it knows, a device that Triton compiles for."""
    if not _can_copy(tuple([side.dtype for side in sides]), flat, scaled):
        return False
    if (why := why_unfused(sides[0].device)) is not None:
        warn_once(why)
        return False
    return True


@cache
def _can_copy(sides: tuple[torch.dtype, ...], flat: torch.dtype, scaled: bool) -> bool:
    return all(can_copy(side, flat, scaled) for side in sides)


_TORCH: dict[str, Callable[..., Any]] = {
    "gather_copy_in": _gather_copy_in,
    "gather_copy_out": _gather_copy_out,
    "reduce_copy_in": _reduce_copy_in,
}
_FUSED: dict[str, Callable[..., Any]] = {
    "gather_copy_in": _gather_copy_in_fused,
    "gather_copy_out": _gather_copy_out_fused,
    "reduce_copy_in": _reduce_copy_in_fused,
}
_FAKE: dict[str, Callable[..., Any]] = {
    "gather_copy_in": _fake_gather_copy_in,
    "gather_copy_out": _fake_gather_copy_out,
    "reduce_copy_in": _fake_reduce_copy_in,
}

for _name, _schema in _SCHEMAS.items():
    torch.library.define(f"graphshard::{_name}", _schema)
    torch.library.impl(f"graphshard::{_name}", "default", _TORCH[_name])
    torch.library.impl(f"graphshard::{_name}", "cuda", _FUSED[_name])
    torch.library.register_fake(f"graphshard::{_name}", _FAKE[_name])

GATHER_COPY_IN = torch.ops.graphshard.gather_copy_in.default
GATHER_COPY_OUT = torch.ops.graphshard.gather_copy_out.default
REDUCE_COPY_IN = torch.ops.graphshard.reduce_copy_in.default
