"""What `bench.copies` copies: the parameters of blocks as large as Llama 3 8B's, on 8 ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphshard.kernels import ops
from graphshard.kernels.segments import Layout, full_layout

WORLD_SIZE = 8
GATHER_IN, GATHER_OUT, REDUCE_IN = "gather copy-in", "gather copy-out", "reduce copy-in"
# q, k, v, o, gate, up, down, two norms.
BLOCK: tuple[tuple[int, ...], ...] = (
    *((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)),
    *((14336, 4096), (14336, 4096), (4096, 14336), (4096,), (4096,)),
)
# Rows and columns in turn: the smallest slice has 16 rows of k and v, 2 of a shard.
MOST_HALVINGS = 12
# Of every first dim, a multiple of 16 before: shards have an odd number of rows, the last one fewer.
_ROWS_LESS = 11

Copy = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class CopyBucket:
    """Whole parameters that are copied together.

    Attributes:
        sizes: of each.
        dims: that each is sharded on.
    """

    sizes: tuple[tuple[int, ...], ...]
    dims: tuple[int, ...]

    @property
    def layout(self) -> Layout:
        return full_layout(self.sizes, self.dims, WORLD_SIZE)

    @property
    def chunks(self) -> list[int]:
        """Elements of each parameter's shard, padding included."""
        return [segment.chunk for segment in self.layout.segments]

    @property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(torch.Size(size).numel() for size in self.sizes)


@dataclass(frozen=True)
class CopyCase:
    """One form of a copy.

    Attributes:
        kind: `GATHER_IN`, `GATHER_OUT` or `REDUCE_IN`.
        side: dtype of the tensors.
        flat: dtype of the flat buffer.
        dim: that matrices are sharded on; norms are sharded on dim 0.
        uneven: sizes are no multiples of the number of ranks, numbers of elements are odd.
        divisor: of what is reduced.
    """

    kind: str
    side: torch.dtype
    flat: torch.dtype
    dim: int = 0
    uneven: bool = False
    divisor: float | None = None

    @property
    def name(self) -> str:
        side, flat = (str(dtype)[6:].replace("float", "fp").replace("bfp", "bf") for dtype in (self.side, self.flat))
        words = [f"{self.kind} {side}" if side == flat else f"{self.kind} {side} to {flat}"]
        words += ["divided"] * (self.divisor is not None) + ["dim 1"] * (self.dim == 1) + ["uneven"] * self.uneven
        return ", ".join(words)

    def flat_bytes(self, bucket: CopyBucket) -> int:
        """Of the flat buffer: one rank's shards before an all-gather, else those of all ranks."""
        rows = 1 if self.kind == GATHER_IN else WORLD_SIZE
        return rows * bucket.layout.row_numel * self.flat.itemsize

    def moved_bytes(self, bucket: CopyBucket) -> int:
        """What any such copy reads and writes, at least; padding is written into a buffer, but never read."""
        if self.kind == GATHER_IN:
            return bucket.layout.row_numel * (self.side.itemsize + self.flat.itemsize)
        if self.kind == GATHER_OUT:
            return bucket.numel * (self.flat.itemsize + self.side.itemsize)
        return bucket.numel * self.side.itemsize + self.flat_bytes(bucket)

    def bucket(self, least_bytes: int) -> CopyBucket:
        """The smallest slice of a block, or the fewest blocks, whose flat buffer has `least_bytes`."""
        for halvings in range(MOST_HALVINGS, -1, -1):
            block = self._block(halvings)
            if (got := self.flat_bytes(block)) >= least_bytes:
                return block
        blocks = -(-least_bytes // got)
        return CopyBucket(block.sizes * blocks, block.dims * blocks)

    def _block(self, halvings: int) -> CopyBucket:
        row_halvings, column_halvings = halvings - halvings // 2, halvings // 2
        sizes = []
        for first, *behind in BLOCK:
            first >>= row_halvings if behind else column_halvings
            columns = [columns >> column_halvings for columns in behind]
            sizes.append((first - _ROWS_LESS * self.uneven, *(number - self.uneven for number in columns)))
        return CopyBucket(tuple(sizes), tuple(self.dim if len(size) > 1 else 0 for size in sizes))

    def tensors(self, bucket: CopyBucket, device: torch.device) -> list[Tensor]:
        """Random values to copy: shards, gradients, or the one gathered buffer."""
        if self.kind == GATHER_IN:
            return [torch.randn(chunk, dtype=self.side, device=device) for chunk in bucket.chunks]
        if self.kind == GATHER_OUT:
            return [torch.randn(WORLD_SIZE * bucket.layout.row_numel, dtype=self.flat, device=device)]
        return [torch.randn(size, dtype=self.side, device=device) for size in bucket.sizes]

    def fused(self, bucket: CopyBucket, tensors: Sequence[Tensor]) -> Copy:
        """graphshard's operator on `tensors`."""
        if self.kind == GATHER_IN:
            dtypes = ",".join(str(self.flat)[6:] for _ in tensors)
            return lambda: [ops.GATHER_COPY_IN(tensors, dtypes)]
        if self.kind == GATHER_OUT:
            wholes = (ops.Whole(size, dim, self.side) for size, dim in zip(bucket.sizes, bucket.dims, strict=True))
            members = ",".join(map(str, wholes))
            return lambda: ops.GATHER_COPY_OUT(tensors[0], members, WORLD_SIZE)
        dims = list(bucket.dims)
        return lambda: [ops.REDUCE_COPY_IN(tensors, dims, WORLD_SIZE, self.flat, None, self.divisor)]


_FP32, _BF16 = torch.float32, torch.bfloat16
CASES = (
    CopyCase(GATHER_IN, _FP32, _BF16),
    CopyCase(GATHER_IN, _BF16, _BF16),
    CopyCase(GATHER_IN, _FP32, _BF16, uneven=True),
    CopyCase(REDUCE_IN, _BF16, _FP32),
    CopyCase(REDUCE_IN, _BF16, _FP32, divisor=float(WORLD_SIZE)),
    CopyCase(REDUCE_IN, _BF16, _BF16),
    CopyCase(REDUCE_IN, _BF16, _FP32, dim=1),
    CopyCase(REDUCE_IN, _BF16, _FP32, uneven=True),
    CopyCase(GATHER_OUT, _BF16, _BF16),
    CopyCase(GATHER_OUT, _BF16, _BF16, dim=1),
    CopyCase(GATHER_OUT, _BF16, _BF16, uneven=True),
)
