"""Fused copies give the bits of torch's own operators, and write nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphshard.kernels import launch, ops
from graphshard.kernels.launch import copy
from graphshard.kernels.segmented_copy import BLOCK
from graphshard.kernels.segments import full_layout, shard_layout

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
GUARD = 37.0


def guarded(numel: int, dtype: torch.dtype, shift: int = 0) -> tuple[Tensor, Tensor]:
    """A tensor inside a larger one that is full of guards; `shift`: elements from an aligned address."""
    whole = torch.full((numel + 128 + shift,), GUARD, dtype=dtype)
    return whole, whole[64 + shift : 64 + shift + numel]


def check_guards(whole: Tensor, inside: Tensor) -> None:
    start = inside.storage_offset()
    assert bool((whole[:start] == GUARD).all()), "written before the buffer"
    assert bool((whole[start + inside.numel() :] == GUARD).all()), "written behind the buffer"


def values(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """All kinds of floats: large, small, subnormal, signed zeros, infinities, ties of rounding."""
    bits = torch.randint(-(2**31), 2**31 - 1, (numel,), generator=torch.Generator().manual_seed(seed))
    found = bits.to(torch.int32).view(torch.float32)
    return torch.where(found.isnan(), torch.full_like(found, -0.0), found).to(dtype)


def same_bits(got: Tensor, want: Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64, 1: torch.int8}[want.dtype.itemsize]
    return got.dtype == want.dtype and got.shape == want.shape and torch.equal(got.view(integer), want.view(integer))


def test_interpreter_rounds_as_hardware_does() -> None:
    source = values(4096, torch.float32, 0)
    flat = torch.empty(4096, dtype=torch.bfloat16)
    copy(flat, shard_layout((4096,)), [source], pack=True)
    assert same_bits(flat, source.bfloat16())


sizes = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple) | st.just((33, 8)) | st.just((3, 5001))
dtypes = st.sampled_from(FLOATS)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 5000), dtypes, st.integers(0, 3)), min_size=1, max_size=4), dtypes)
def test_gather_copy_in(members: list[tuple[int, torch.dtype, int]], wire: torch.dtype) -> None:
    shards = []
    for k, (numel, dtype, shift) in enumerate(members):
        _, inside = guarded(numel, dtype, shift)
        inside.copy_(values(numel, dtype, k))
        shards.append(inside)
    layout = shard_layout(tuple(shard.numel() for shard in shards))
    whole, flat = guarded(layout.row_numel, wire)
    copy(flat, layout, shards, pack=True)
    assert same_bits(flat, torch.cat([shard.to(wire) for shard in shards]))
    check_guards(whole, flat)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[int], int]:
    """Sizes of tensors, the dims that they are sharded on, and over how many ranks."""
    drawn = draw(st.lists(sizes, min_size=1, max_size=4))
    return drawn, [draw(st.integers(0, len(size) - 1)) for size in drawn], draw(st.sampled_from([1, 2, 3, 8]))


@settings(max_examples=60)
@given(cuts(), dtypes, dtypes, st.sampled_from([(None, None), (0.375, None), (None, 3.0), (None, 8.0)]))
def test_reduce_copy_in(
    cut: tuple[list[tuple[int, ...]], list[int], int],
    dtype: torch.dtype,
    wire: torch.dtype,
    by: tuple[float | None, float | None],
) -> None:
    shapes, dims, world_size = cut
    grads = [values(torch.Size(size).numel(), dtype, k).view(size) for k, size in enumerate(shapes)]
    multiplier, divisor = by
    # As on CUDA: torch divides by a number as it multiplies by its reciprocal.
    factor = multiplier if divisor is None else float(torch.ones(()) / divisor)
    want = ops._reduce_copy_in(grads, dims, world_size, wire, factor, None)
    got = ops._reduce_copy_in_fused(grads, dims, world_size, wire, multiplier, divisor)
    nan = want.isnan()
    assert torch.equal(nan, got.isnan())
    assert same_bits(got.masked_fill(nan, 0.0), want.masked_fill(nan, 0.0))


@settings(max_examples=60)
@given(cuts(), dtypes)
def test_gather_copy_out(cut: tuple[list[tuple[int, ...]], list[int], int], dtype: torch.dtype) -> None:
    shapes, dims, world_size = cut
    layout = full_layout(tuple(shapes), tuple(dims), world_size)
    flat = values(layout.rows * layout.row_numel, dtype, 1)
    guards = [guarded(torch.Size(size).numel(), dtype) for size in shapes]
    copy(flat, layout, [inside for _, inside in guards], pack=False)
    members = ",".join(str(ops.Whole(size, dim, dtype)) for size, dim in zip(shapes, dims, strict=True))
    for (whole, got), want in zip(guards, ops._gather_copy_out(flat, members, world_size), strict=True):
        assert same_bits(got, want.view(-1))
        check_guards(whole, got)


def test_copies_of_other_dtypes_move_bits() -> None:
    for dtype in (torch.uint8, torch.int64, torch.float64, torch.bool):
        shards = [torch.arange(numel).to(dtype) for numel in (5, 0, 300)]
        text = ",".join(str(dtype)[6:] for _ in shards)
        assert torch.equal(ops._gather_copy_in_fused(shards, text), torch.cat(shards))


def test_members_of_several_dtypes_are_gathered_as_bytes() -> None:
    shards = [values(7, torch.float32, 0), values(5, torch.float32, 1), values(4, torch.float16, 2)]
    text = "bfloat16,float32,float16"
    got = ops._gather_copy_in_fused(shards, text)
    assert torch.equal(got, ops._gather_copy_in(shards, text))
    members = "7@0:bfloat16,5@0:float32,4@0:float16"
    for a, b in zip(ops._gather_copy_out_fused(got, members, 1), shards, strict=True):
        assert same_bits(a, b.to(a.dtype))


BAD: dict[str, tuple[Any, str]] = {
    "dtypes": (lambda o: o.gather_copy_in([torch.zeros(2)], "float32,float32"), "got 2 for 1 shards, want one each"),
    "strided": (lambda o: o.gather_copy_in([torch.zeros(4)[::2]], "float32"), r"got strides \(2,\), want a contiguous"),
    "shape": (lambda o: o.gather_copy_in([torch.zeros(2, 2)], "float32"), r"got shape \(2, 2\), want one dim"),
    "device": (
        lambda o: o.gather_copy_in([torch.zeros(2), torch.zeros(2, device="meta")], "float32,float32"),
        r"shards\[1\]: got a tensor on meta, want one on cpu",
    ),
    "flat": (
        lambda o: o.gather_copy_out(torch.zeros(3), "2x2@0:float32", 2),
        r"got float32 \(3,\), want float32 \(4,\)",
    ),
    "flat dtype": (lambda o: o.gather_copy_out(torch.zeros(4), "2x2@0:bfloat16", 2), r"got float32 .*, want bfloat16"),
    "dim": (
        lambda o: o.reduce_copy_in([torch.zeros(2)], [1], 2, torch.float32, None, None),
        r"dims\[0\]: got 1, want a dim of \(2,\)",
    ),
    "both": (
        lambda o: o.reduce_copy_in([torch.zeros(2)], [0], 2, torch.float32, 2.0, 2.0),
        "got 2.0 beside a multiplier, want one",
    ),
    "world": (
        lambda o: o.reduce_copy_in([torch.zeros(2)], [0], 0, torch.float32, None, None),
        "got 0, want at least 1",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments_are_refused_before_a_launch(what: str) -> None:
    call, message = BAD[what]
    with pytest.raises((ValueError, RuntimeError), match=message):
        call(torch.ops.graphshard)


def test_bytes_before_another_dtype_are_copied_out_as_what_they_are() -> None:
    wanted = [ops.Whole((4, 3), 0, torch.uint8), ops.Whole((5,), 0, torch.bfloat16)]
    members = ",".join(map(str, wanted))
    flat = values(2 * (2 * 3 + 3 * 2), torch.uint8, 1)
    for got, want in zip(
        ops._gather_copy_out_fused(flat, members, 2), ops._gather_copy_out(flat, members, 2), strict=True
    ):
        assert same_bits(got, want)


def test_blocks_of_a_layout_are_made_once_for_all_addresses() -> None:
    layout = full_layout(((5, 300), (0, 4), (1000, 7)), (0, 0, 0), 2)
    tables = launch._Tables()
    with torch.device("meta"):  # a user's default device is not theirs
        (first, blocks), (second, others) = (tables.get(torch.device("cpu"), (at, 8, 16), layout) for at in (0, 32))
    assert blocks is others and first.table.tolist() != second.table.tolist()
    counts = [-(-segment.chunk // BLOCK) for segment in layout.segments]
    assert blocks.tolist() == [[k, number] for k, count in enumerate(counts) for number in range(count)]
