"""The operators of fused copies on CUDA: the bits of their CPU implementations, and nothing else written."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from graphshard.kernels import ops
from graphshard.kernels.segments import full_layout, shard_layout
from graphshard.testing import WorkerPool
from graphshard.testing.devices import no_synchronization

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FLOATS = (F32, BF16, F16)
OTHERS = (torch.uint8, torch.int64, torch.float64, torch.bool)
GUARD = 37.0
NUMEL_4GIB = 1_200_000_000  # two of them, in two bytes each: addresses and numbers of elements behind 32 bits


class Cut(NamedTuple):
    """Whole tensors, the dims that they are sharded on, and over how many ranks."""

    sizes: tuple[tuple[int, ...], ...]
    dims: tuple[int, ...]
    world_size: int


CUTS = {
    "even": Cut(((8, 16), (16,), (64, 8)), (0, 0, 0), 8),
    "aligned, several blocks": Cut(((4096, 64), (8, 8192)), (0, 0), 2),
    "uneven": Cut(((13, 7), (3, 4), (1,), (17, 2, 3)), (0, 0, 0, 0), 8),
    "empty": Cut(((0, 4), (5, 3), (0,)), (0, 0, 0), 4),
    "one rank": Cut(((5, 3), (7,)), (0, 0), 1),
    "later dims": Cut(((4, 6), (3, 8, 5), (2, 3, 16)), (1, 1, 2), 2),
    "later dims, uneven": Cut(((4, 7), (64, 24), (9, 2)), (1, 1, 0), 4),
    "large": Cut(((4097, 33), (3, 5001)), (0, 1), 3),
}
SCALES = [(None, None), (0.375, None), (None, 3.0), (None, 8.0)]


def values(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """All kinds of numbers, on CPU: large, small, subnormal, signed zeros, infinities, ties of rounding."""
    bits = torch.randint(-(2**31), 2**31 - 1, (numel,), generator=torch.Generator().manual_seed(seed))
    if not dtype.is_floating_point:
        return bits.to(dtype)
    found = bits.to(torch.int32).view(F32)
    return torch.where(found.isnan(), -0.0, found).to(dtype)


def check_bits(got: Tensor, want: Tensor) -> None:
    """NaN, of infinity times zero, may have any payload."""
    got = got.cpu()
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    if want.dtype.is_floating_point:
        assert torch.equal(got.isnan(), want.isnan())
        got, want = got.masked_fill(want.isnan(), 0.0), want.masked_fill(want.isnan(), 0.0)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[want.dtype.itemsize]
    assert torch.equal(got.view(integer), want.view(integer))


def on(device: str, tensor: Tensor, shift: int = 0) -> Tensor:
    """A copy, `shift` elements behind an aligned address."""
    whole = torch.empty(tensor.numel() + shift, dtype=tensor.dtype, device=device)
    return whole[shift:].view(tensor.shape).copy_(tensor)


def text(dtypes: Sequence[torch.dtype]) -> str:
    return ",".join(str(dtype)[6:] for dtype in dtypes)


def members_of(cut: Cut, dtypes: Sequence[torch.dtype]) -> str:
    pairs = itertools.cycle(dtypes)
    return ",".join(str(ops.Whole(size, dim, next(pairs))) for size, dim in zip(cut.sizes, cut.dims, strict=True))


# --- bits


def gather_copy_in(device: str, sides: Sequence[torch.dtype], wires: Sequence[torch.dtype]) -> None:
    """Shards of each of the dtypes `sides`, of all sizes and alignments, into a buffer of `wires`."""
    for numels in ((5, 0, 300), (4096, 64, 8192), (3 * 4096 + 1, 7, 4096), (1,)):
        for shift in (0, 1, 3):
            dtypes = list(itertools.islice(itertools.cycle(sides), len(numels)))
            shards = [values(numel, dtype, k) for k, (numel, dtype) in enumerate(zip(numels, dtypes, strict=True))]
            wanted = text(list(itertools.islice(itertools.cycle(wires), len(numels))))
            want = torch.ops.graphshard.gather_copy_in(shards, wanted)
            got = torch.ops.graphshard.gather_copy_in([on(device, shard, shift) for shard in shards], wanted)
            assert got.device.type == device
            check_bits(got, want)


def gather_copy_out(device: str, case: str, dtypes: Sequence[torch.dtype]) -> None:
    cut = CUTS[case]
    members = members_of(cut, dtypes)
    wanted = ops.parse_members(members)
    wire = ops.wire_dtype(tuple(member.dtype for member in wanted))
    layout = full_layout(cut.sizes, cut.dims, cut.world_size)
    bytes_of = [1 if wire == m.dtype else m.dtype.itemsize for m in wanted]
    row = sum(segment.chunk * size for segment, size in zip(layout.segments, bytes_of, strict=True))
    flat = values(row * cut.world_size, wire, 1)
    want = torch.ops.graphshard.gather_copy_out(flat, members, cut.world_size)
    for shift in (0, 1):
        got = torch.ops.graphshard.gather_copy_out(on(device, flat, shift), members, cut.world_size)
        for ours, theirs in zip(got, want, strict=True):
            assert ours.is_contiguous()
            check_bits(ours, theirs)


def reduce_copy_in(device: str, case: str, side: torch.dtype, wire: torch.dtype) -> None:
    cut = CUTS[case]
    grads = [values(torch.Size(size).numel(), side, k).view(size) for k, size in enumerate(cut.sizes)]
    ours = [on(device, grad) for grad in grads]
    ours[0] = ours[0].t().contiguous().t() if ours[0].dim() == 2 else ours[0]  # autograd's may have any strides
    for multiplier, divisor in SCALES:
        # As torch divides by a number on CUDA: by its reciprocal.
        factor = multiplier if divisor is None else float(torch.ones(()) / divisor)
        want = torch.ops.graphshard.reduce_copy_in(grads, cut.dims, cut.world_size, wire, factor, None)
        got = torch.ops.graphshard.reduce_copy_in(ours, cut.dims, cut.world_size, wire, multiplier, divisor)
        check_bits(got, want)


PAIRS = list(itertools.product(FLOATS, repeat=2))


@pytest.mark.parametrize(("side", "wire"), PAIRS, ids=str)
def test_gather_copy_in_gives_the_bits_of_torch(gpu: WorkerPool, side: torch.dtype, wire: torch.dtype) -> None:
    gpu.run(gather_copy_in, gpu.device, [side], [wire])


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_other_dtypes_are_moved(gpu: WorkerPool, dtype: torch.dtype) -> None:
    gpu.run(gather_copy_in, gpu.device, [dtype], [dtype])


def test_gather_copy_in_of_several_dtypes(gpu: WorkerPool) -> None:
    gpu.run(gather_copy_in, gpu.device, [F32, BF16, F16], [BF16])  # one launch each
    gpu.run(gather_copy_in, gpu.device, [F32, F32, F16], [BF16, F32, F16])  # as bytes


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64, torch.uint8], ids=str)
@pytest.mark.parametrize("case", CUTS)
def test_gather_copy_out_gives_the_bits_of_torch(gpu: WorkerPool, case: str, dtype: torch.dtype) -> None:
    gpu.run(gather_copy_out, gpu.device, case, [dtype])


def test_gather_copy_out_of_several_dtypes(gpu: WorkerPool) -> None:
    gpu.run(gather_copy_out, gpu.device, "uneven", [BF16, F32])


@pytest.mark.parametrize(("side", "wire"), PAIRS, ids=str)
@pytest.mark.parametrize("case", CUTS)
def test_reduce_copy_in_gives_the_bits_of_torch(
    gpu: WorkerPool, case: str, side: torch.dtype, wire: torch.dtype
) -> None:
    gpu.run(reduce_copy_in, gpu.device, case, side, wire)


# --- what is written


def write_between_guards(device: str, case: str, shift: int) -> None:
    copy = importlib.import_module("graphshard.kernels.launch").copy
    cut = CUTS[case]
    layout = full_layout(cut.sizes, cut.dims, cut.world_size)

    def guarded(numel: int) -> tuple[Tensor, Tensor]:
        whole = torch.full((numel + 128 + shift,), GUARD, dtype=BF16, device=device)
        return whole, whole[64 + shift : 64 + shift + numel]

    def check(whole: Tensor, inside: Tensor) -> None:
        start = inside.storage_offset()
        assert bool((whole[:start] == GUARD).all()), "written before it"
        assert bool((whole[start + inside.numel() :] == GUARD).all()), "written behind it"

    sources = [values(torch.Size(size).numel(), BF16, k) for k, size in enumerate(cut.sizes)]
    whole, flat = guarded(layout.rows * layout.row_numel)
    copy(flat, layout, [on(device, source, shift) for source in sources], pack=True)
    check(whole, flat)
    outputs = [guarded(source.numel()) for source in sources]
    copy(flat, layout, [inside for _, inside in outputs], pack=False)
    for (whole, inside), source in zip(outputs, sources, strict=True):
        check(whole, inside)
        check_bits(inside, source)  # there and back


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("case", CUTS)
def test_copies_write_nothing_else(gpu: WorkerPool, case: str, shift: int) -> None:
    gpu.run(write_between_guards, gpu.device, case, shift)


def copy_more_than_4_gib(device: str, numel: int) -> None:
    """Compared on the device, by parts: each tensor's part of a row is half of it."""
    half = numel // 2
    sizes, dtype = f"{numel}@0:bfloat16,{numel}@0:bfloat16", torch.int16
    flat = torch.empty(2 * numel, dtype=dtype, device=device).random_().view(BF16)
    full = torch.ops.graphshard.gather_copy_out(flat, sizes, 2)
    rows = flat.view(dtype).view(2, 2, half)
    for k, tensor in enumerate(full):
        for rank in range(2):
            assert torch.equal(tensor.view(dtype).view(2, half)[rank], rows[rank, k])
    del flat, rows
    packed = torch.ops.graphshard.reduce_copy_in(full, [0, 0], 2, BF16, None, None).view(dtype).view(2, 2, half)
    for k, tensor in enumerate(full):
        for rank in range(2):
            assert torch.equal(packed[rank, k], tensor.view(dtype).view(2, half)[rank])
    del packed
    shards = [tensor.view(dtype).float() for tensor in full]
    del full
    sent = torch.ops.graphshard.gather_copy_in(shards, "bfloat16,bfloat16").view(2, numel)
    for k, shard in enumerate(shards):
        assert torch.equal(sent[k], shard.bfloat16())


def test_buffers_of_more_than_4_gib(gpu: WorkerPool) -> None:
    gpu.run(copy_more_than_4_gib, gpu.device, NUMEL_4GIB)


# --- tables of addresses


def reuse_tables(device: str) -> None:
    tables: Any = importlib.import_module("graphshard.kernels.launch")._tables

    def check(shards: Sequence[Tensor]) -> None:
        got = torch.ops.graphshard.gather_copy_in(shards, "bfloat16,bfloat16")
        check_bits(got, torch.cat([shard.cpu().bfloat16() for shard in shards]))

    memory = torch.empty(8192, device=device)

    def placed(*numels: int) -> list[Tensor]:
        """Shards that begin at the same two addresses."""
        starts = (0, 2048)
        return [memory[start : start + numel].normal_() for start, numel in zip(starts, numels, strict=True)]

    shards = placed(300, 4096)
    check(shards)
    count = len(tables.segments.found)
    check(placed(300, 4096))  # new values, the same table
    assert len(tables.segments.found) == count
    elsewhere = [shard.clone() for shard in shards]
    memory.fill_(torch.nan)
    check(elsewhere)  # moved: the old addresses hold NaN
    assert len(tables.segments.found) == count + 1
    check(placed(299, 4095))  # other sizes at the old addresses
    check(elsewhere)
    assert len(tables.segments.found) == count + 2


def test_tables_are_used_again_and_never_stale(gpu: WorkerPool) -> None:
    gpu.run(reuse_tables, gpu.device)


# --- streams


def all_copies(device: str) -> tuple[list[Tensor], Callable[[], list[Tensor]]]:
    """Tensors, and a function that copies them in and out by all three operators."""
    cut = CUTS["uneven"]
    grads = [on(device, values(torch.Size(size).numel(), F32, k).view(size)) for k, size in enumerate(cut.sizes)]
    shards = [on(device, values(numel, F32, numel)) for numel in (300, 4096, 1)]
    row_numel = full_layout(cut.sizes, cut.dims, cut.world_size).row_numel
    flat = on(device, values(row_numel * cut.world_size, BF16, 5))
    tensors = [*grads, *shards, flat]

    def run() -> list[Tensor]:
        sent = torch.ops.graphshard.gather_copy_in(shards, "bfloat16,bfloat16,bfloat16")
        full = torch.ops.graphshard.gather_copy_out(flat, members_of(cut, [BF16]), cut.world_size)
        scaled = torch.ops.graphshard.reduce_copy_in(grads, cut.dims, cut.world_size, BF16, None, 3.0)
        return [sent, *full, scaled]

    return tensors, run


def change(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        tensor.neg_().add_(1.0)


def copy_on_another_stream(device: str) -> None:
    """What the copies read is written on their stream, late: on any other they would read the values before."""
    tensors, run = all_copies(device)
    run()
    want_of = [tensor.clone() for tensor in tensors]
    change(want_of)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # cycles: 50 ms
        change(tensors)
        got = run()
    stream.synchronize()
    assert all(map(torch.equal, tensors, want_of))
    for ours, theirs in zip(got, run(), strict=True):
        check_bits(ours, theirs.cpu())


def test_copies_run_on_the_current_stream(gpu: WorkerPool) -> None:
    gpu.run(copy_on_another_stream, gpu.device)


def copy_without_synchronization(device: str) -> None:
    _, run = all_copies(device)
    run()  # compiles
    tensors, run = all_copies(device)
    torch.cuda.synchronize()
    with no_synchronization():
        run()  # makes tables, which go to the GPU
        run()
        with pytest.raises(RuntimeError, match="synchroniz"):
            tensors[0].sum().item()


def test_copies_wait_for_nothing(gpu: WorkerPool) -> None:
    gpu.run(copy_without_synchronization, gpu.device)


def capture_and_replay(device: str) -> None:
    tensors, run = all_copies(device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run()
    for _ in range(3):
        change(tensors)
        for output in captured:
            output.fill_(GUARD)
        graph.replay()
        for ours, theirs in zip(captured, run(), strict=True):
            check_bits(ours, theirs.cpu())


def test_captured_copies_replay_with_new_values(gpu: WorkerPool) -> None:
    gpu.run(capture_and_replay, gpu.device)


def packed_shards(device: str) -> None:
    """The buffer of one rank's shards has one row: the layout that both directions share."""
    copy = importlib.import_module("graphshard.kernels.launch").copy
    shards = [on(device, values(numel, BF16, numel)) for numel in (8, 4096, 16)]
    layout = shard_layout(tuple(shard.numel() for shard in shards))
    flat = torch.empty(layout.row_numel, dtype=BF16, device=device)
    copy(flat, layout, shards, pack=True)
    back = [torch.empty_like(shard) for shard in shards]
    copy(flat, layout, back, pack=False)
    for ours, theirs in zip(back, shards, strict=True):
        check_bits(ours, theirs.cpu())


def test_shards_come_back(gpu: WorkerPool) -> None:
    gpu.run(packed_shards, gpu.device)
