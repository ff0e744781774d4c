"""What graphshard's copies are compared with: torch's own operators, one by one and in FSDP2's sequences.

Of FSDP2 the operators that it calls, in their order, with the buffers that it allocates itself allocated in each call;
outputs are there before, which flatters. Sequences are named after what they call.

Source: torch.distributed.fsdp, `foreach_all_gather`, `foreach_all_gather_copy_out`, `foreach_reduce`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed.fsdp  # registers torch.ops.fsdp
from torch import Tensor
from torch.nn.functional import pad

from bench.copies.cases import GATHER_IN, GATHER_OUT, WORLD_SIZE, Copy, CopyBucket, CopyCase

aten, fsdp = torch.ops.aten, torch.ops.fsdp
_CHUNK_CAT = aten._chunk_cat.out  # noqa: SLF001  # an operator, public in its registry
FSDP2 = "fsdp2: "
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Compared at once: a comparison of everything would take as much memory again.
_COMPARED_NUMEL = 2**28


@dataclass(frozen=True)
class Peer:
    """Another way to do the same copy.

    Attributes:
        run: does it, and returns what graphshard's operator returns.
        outputs: buffers that it writes; none: it allocates them.
    """

    name: str
    run: Copy
    outputs: tuple[Tensor, ...] = ()

    def differs_from(self, want: Sequence[Tensor]) -> bool:
        """Runs it once: whether it gives other bits."""
        for output in self.outputs:
            output.fill_(torch.nan)
        return not same_bits(self.run(), want)


def same_bits(got: Sequence[Tensor], want: Sequence[Tensor]) -> bool:
    """Whether dtypes, shapes and all bits are the same."""
    if [(one.dtype, one.shape) for one in got] != [(one.dtype, one.shape) for one in want]:
        return False
    return all(
        torch.equal(left, right)
        for one, other in zip(got, want, strict=True)
        for left, right in zip(_pieces(one), _pieces(other), strict=True)
    )


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    return torch.split(tensor.reshape(-1).view(_INTEGERS[tensor.dtype.itemsize]), _COMPARED_NUMEL)


def peers_of(case: CopyCase, bucket: CopyBucket, tensors: Sequence[Tensor], compiler: str | None) -> list[Peer]:
    """All peers that do the copy.

    Args:
        case: the copy.
        bucket: the parameters.
        tensors: that are copied.
        compiler: backend of `torch.compile` for casts and `torch.cat`; None: not compared.
    """
    if case.kind == GATHER_OUT:
        return list(_gather_out(bucket, tensors[0]))
    rows = 1 if case.kind == GATHER_IN else WORLD_SIZE
    flat = tensors[0].new_empty(rows * bucket.layout.row_numel, dtype=case.flat)
    if case.kind == GATHER_IN:
        return [*_gather_in(tensors, flat), *_joined(case, bucket, tensors, compiler)]
    return [*_reduce_in(case, bucket, tensors, flat), *_joined(case, bucket, tensors, compiler)]


def _gather_in(shards: Sequence[Tensor], flat: Tensor) -> Iterator[Peer]:
    numels = [shard.numel() for shard in shards]
    views = torch.split(flat, numels)
    casts = shards[0].dtype != flat.dtype

    def as_fsdp2() -> list[Tensor]:
        inputs = shards
        if casts:
            inputs = torch.split(torch.empty_like(flat), numels)
            aten._foreach_copy_(inputs, shards)
        fsdp.all_gather_copy_in(inputs, flat, numels, flat.numel(), 0)
        return [flat]

    def foreach() -> list[Tensor]:
        aten._foreach_copy_(views, shards)
        return [flat]

    yield Peer(FSDP2 + "foreach cast, " * casts + "fsdp.all_gather_copy_in", as_fsdp2, (flat,))
    yield Peer("_foreach_copy_", foreach, (flat,))


def _reduce_in(case: CopyCase, bucket: CopyBucket, grads: Sequence[Tensor], flat: Tensor) -> Iterator[Peer]:
    rows = flat.view(WORLD_SIZE, -1)
    later = any(bucket.dims)
    before, behind = "chunk, cat, " * later, ", div_" * (case.divisor is not None)

    def on_dim_0() -> list[Tensor]:
        pairs = zip(grads, bucket.dims, strict=True)
        return [torch.cat(grad.chunk(WORLD_SIZE, dim)) if dim else grad for grad, dim in pairs]

    def divided() -> list[Tensor]:
        return [flat if case.divisor is None else flat.div_(case.divisor)]

    def as_fsdp2() -> list[Tensor]:
        fsdp.chunk_cat(on_dim_0(), 0, WORLD_SIZE, out=rows)
        return divided()

    def chunk_cat() -> list[Tensor]:
        _CHUNK_CAT(on_dim_0(), 0, WORLD_SIZE, out=rows)
        return divided()

    yield Peer(f"{FSDP2}{before}fsdp.chunk_cat{behind}", as_fsdp2, (flat,))
    yield Peer(f"{before}_chunk_cat{behind}", chunk_cat, (flat,))
    if case.uneven:  # padding would take kernels of its own
        return
    targets = [_by_rank(part, size, dim) for part, size, dim in _parts(rows, bucket)]
    sources = [_split_by_rank(grad, dim) for grad, dim in zip(grads, bucket.dims, strict=True)]

    def foreach() -> list[Tensor]:
        aten._foreach_copy_(targets, sources)
        return divided()

    yield Peer(f"_foreach_copy_{behind}", foreach, (flat,))


def _gather_out(bucket: CopyBucket, flat: Tensor) -> Iterator[Peer]:
    rows, chunks = flat.view(WORLD_SIZE, -1), bucket.chunks
    padded = [flat.new_empty(_padded_size(size, dim)) for size, dim in zip(bucket.sizes, bucket.dims, strict=True)]
    trios = list(zip(padded, bucket.sizes, bucket.dims, strict=True))
    wholes = [whole.narrow(dim, 0, size[dim]) for whole, size, dim in trios]

    def outputs() -> list[Tensor]:
        return [torch.empty_like(whole) if dim else whole for whole, _, dim in trios]

    def joined(copied: Sequence[Tensor]) -> list[Tensor]:
        for (whole, size, dim), got in zip(trios, copied, strict=True):
            if dim:
                torch.cat(_by_rank(got.view(WORLD_SIZE, -1), size, dim).unbind(), dim, out=whole)
        return wholes

    def as_fsdp2() -> list[Tensor]:
        copied = outputs()
        fsdp.split_with_sizes_copy(rows, chunks, dim=1, out=[one.view(WORLD_SIZE, -1) for one in copied])
        return joined(copied)

    def split_copy() -> list[Tensor]:
        copied = outputs()
        aten.split_with_sizes_copy.out(rows, chunks, 1, out=[one.view(WORLD_SIZE, -1) for one in copied])
        return joined(copied)

    targets = [_split_by_rank(whole, dim) for whole, _, dim in trios]
    sources = [_by_rank(part, size, dim) for part, size, dim in _parts(rows, bucket)]

    def foreach() -> list[Tensor]:
        aten._foreach_copy_(targets, sources)
        return wholes

    def plain() -> list[Tensor]:
        found = []
        for part, size, dim in _parts(rows, bucket):
            whole = _by_rank(part, size, dim).movedim(0, dim).reshape(_padded_size(size, dim))
            found.append(whole.narrow(dim, 0, size[dim]))
        return found

    behind = ", cat" * any(bucket.dims)
    yield Peer(f"{FSDP2}fsdp.split_with_sizes_copy{behind}", as_fsdp2, tuple(padded))
    yield Peer(f"split_with_sizes_copy{behind}", split_copy, tuple(padded))
    yield Peer("_foreach_copy_", foreach, tuple(padded))
    yield Peer("split, reshape", plain)


def _joined(case: CopyCase, bucket: CopyBucket, tensors: Sequence[Tensor], compiler: str | None) -> Iterator[Peer]:
    """Casts and `torch.cat`, as they are and compiled."""
    dims = bucket.dims if case.kind != GATHER_IN else ()

    def join(members: Sequence[Tensor]) -> list[Tensor]:
        cast = [member.to(case.flat) for member in members]
        if not dims:
            return [torch.cat(cast)]
        rows = [_rows(member, dim) for member, dim in zip(cast, dims, strict=True)]
        flat = torch.cat(rows, 1).view(-1)
        return [flat if case.divisor is None else flat / case.divisor]

    name = "cast, " * (case.side != case.flat) + "cat" + ", div" * (case.divisor is not None)
    yield Peer(name, lambda: join(tensors))
    if compiler is not None:
        torch.compiler.reset()  # or the last row's code counts as recompiled
        compiled = torch.compile(join, backend=compiler, dynamic=False, fullgraph=True)
        yield Peer(f"{compiler}: {name}", lambda: compiled(tensors))


def _rows(whole: Tensor, dim: int) -> Tensor:
    """A row for each rank of a tensor, padded with zeros."""
    missing = -whole.shape[dim] % WORLD_SIZE
    if missing:
        whole = pad(whole, [0, 0] * (whole.dim() - dim - 1) + [0, missing])
    return _split_by_rank(whole, dim).reshape(WORLD_SIZE, -1)


def _padded_size(size: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*size[:dim], size[dim] - size[dim] % -WORLD_SIZE, *size[dim + 1 :])


def _parts(rows: Tensor, bucket: CopyBucket) -> Iterator[tuple[Tensor, tuple[int, ...], int]]:
    """Each parameter's columns of the rows, its size, the dim that it is sharded on."""
    return zip(torch.split(rows, bucket.chunks, 1), bucket.sizes, bucket.dims, strict=True)


def _by_rank(part: Tensor, size: tuple[int, ...], dim: int) -> Tensor:
    """Columns of the rows as shards: `[W, ...]`."""
    length = -(-size[dim] // WORLD_SIZE)
    return part.view(WORLD_SIZE, *size[:dim], length, *size[dim + 1 :])


def _split_by_rank(whole: Tensor, dim: int) -> Tensor:
    """A whole tensor, padded, as shards: `[W, ...]`."""
    return whole.view(*whole.shape[:dim], WORLD_SIZE, -1, *whole.shape[dim + 1 :]).movedim(dim, 0)
