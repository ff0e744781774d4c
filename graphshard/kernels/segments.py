"""Where the elements of each tensor lie in a flat buffer: what the copies' table says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class Segment(NamedTuple):
    """One tensor's part of each row of a buffer, in elements.

    Attributes:
        offset: in a row.
        chunk: elements in each row, padding included.
        inner: of a chunk, those that are together in the tensor.
        stride: elements of the tensor from one of these parts to the next.
    """

    offset: int
    chunk: int
    inner: int
    stride: int


@dataclass(frozen=True, eq=False)
class Layout:
    """A buffer `[rows, row_numel]`. Equal to itself alone: as a key it costs nothing.

    Attributes:
        rows: number of shards of each tensor; 1 for what one rank sends.
        row_numel: elements of a row.
        segments: of each tensor.
    """

    rows: int
    row_numel: int
    segments: tuple[Segment, ...]

    @cached_property
    def strided(self) -> bool:
        """Whether some tensor is sharded on a dim behind its first."""
        return any(segment.inner != segment.chunk for segment in self.segments)

    @cached_property
    def alignment(self) -> int:
        """Largest power of two, up to 16, that divides every number of elements."""
        numbers = [self.row_numel, *(number for segment in self.segments for number in segment)]
        return math.gcd(16, *numbers)


@lru_cache(maxsize=4096)
def shard_layout(numels: tuple[int, ...]) -> Layout:
    """Of one rank's shards, one behind the other."""
    offset, segments = 0, []
    for numel in numels:
        segments.append(Segment(offset, numel, numel, numel))
        offset += numel
    return Layout(1, offset, tuple(segments))


@lru_cache(maxsize=4096)
def full_layout(sizes: tuple[tuple[int, ...], ...], dims: tuple[int, ...], world_size: int) -> Layout:
    """Of whole tensors, one row for each rank's shards.

    Args:
        sizes: of the tensors, without padding.
        dims: that each is sharded on; it is padded to a multiple of `world_size`.
        world_size: number of ranks.
    """
    offset, segments = 0, []
    for size, dim in zip(sizes, dims, strict=True):
        length = -(-size[dim] // world_size)
        behind = math.prod(size[dim + 1 :])
        inner, stride = length * behind, size[dim] * behind
        chunk = math.prod(size[:dim]) * inner
        segments.append(Segment(offset, chunk, inner, stride))
        offset += chunk
    return Layout(world_size, offset, tuple(segments))


def block_map(segments: Sequence[Segment], block: int) -> Tensor:
    """(Segment, number of the block in it) of each block of `block` elements; an empty segment has none.

    Returns:
        int32 `[blocks, 2]`, in order, on the CPU.
    """
    counts = torch.tensor([-(-segment.chunk // block) for segment in segments], device="cpu")
    total = int(counts.sum())
    of = torch.repeat_interleave(torch.arange(len(segments), device="cpu"), counts, output_size=total)
    first = counts.cumsum(0) - counts
    return torch.stack((of, torch.arange(total, device="cpu") - first[of]), dim=1).int()
