"""Launches segmented copies: tables of addresses, made once for the same addresses, and one launch for each dtype."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from graphshard.kernels.segmented_copy import ADDRESS_BYTES, ALIGNED, BLOCK, COLUMNS, NUM_WARPS, copy_segments
from graphshard.kernels.segments import Layout, block_map

# What is only moved is moved as integers; a cast needs the dtype itself.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CAST = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_MOVED = {torch.int8: tl.int8, torch.int16: tl.int16, torch.int32: tl.int32, torch.int64: tl.int64}
# Addresses of gradients may differ from step to step, so tables are dropped again: the oldest use first.
_MOST_TABLES = 4096


class _Table(NamedTuple):
    """What a launch reads of its tensors.

    Attributes:
        segments: int64 `[K, 5]`.
        blocks: int32 `[B, 2]`.
        aligned: whether addresses and numbers of elements let the kernel move 16 bytes at a time.
    """

    segments: Tensor
    blocks: Tensor
    aligned: bool


class _Tables:
    """Tables on a device, by the stream that reads them and by the addresses and the layout that they hold."""

    def __init__(self) -> None:
        self._found: OrderedDict[object, _Table] = OrderedDict()
        self._captured: list[_Table] = []

    def get(self, device: torch.device, addresses: tuple[int, ...], layout: Layout) -> _Table:
        """On `device`, the current one, for tensors at `addresses`."""
        if device.type != "cuda":
            return self._cached((addresses, layout), lambda: _host_table(addresses, layout))
        if torch.cuda.is_current_stream_capturing():
            # Every replay copies them again: the host's stay, and the device's are the graph's scratch. None of the
            # others' is taken, and none is left to others: what a capture copies is not there before a replay.
            host = _pinned(_host_table(addresses, layout))
            self._captured.append(host)
            return _on(device, host)
        stream = torch.cuda.current_stream(device).cuda_stream  # another one is not behind the copy
        key = (device.index, stream, addresses, layout)
        return self._cached(key, lambda: _on(device, _pinned(_host_table(addresses, layout))))

    def _cached(self, key: object, make: Callable[[], _Table]) -> _Table:
        if (found := self._found.get(key)) is not None:
            self._found.move_to_end(key)
            return found
        found = self._found[key] = make()
        if len(self._found) > _MOST_TABLES:
            self._found.popitem(last=False)
        return found


def _host_table(addresses: tuple[int, ...], layout: Layout) -> _Table:
    rows = [(address, *segment) for address, segment in zip(addresses, layout.segments, strict=True)]
    assert len(rows[0]) == COLUMNS
    aligned = layout.alignment >= ALIGNED and not any(address % ADDRESS_BYTES for address in addresses)
    blocks = torch.tensor(block_map(layout.segments, BLOCK), dtype=torch.int32)
    return _Table(torch.tensor(rows, dtype=torch.int64), blocks, aligned)


def _pinned(table: _Table) -> _Table:
    """Its copy waits for nothing, and the allocator keeps the host's memory until it is done."""
    return _Table(table.segments.pin_memory(), table.blocks.pin_memory(), table.aligned)


def _on(device: torch.device, table: _Table) -> _Table:
    segments, blocks = (tensor.to(device, non_blocking=True) for tensor in (table.segments, table.blocks))
    return _Table(segments, blocks, table.aligned)


_tables = _Tables()


class _Part(NamedTuple):
    """What one launch copies.

    Attributes:
        dtype: of its tensors.
        members: of all tensors, the numbers of its own.
        layout: of these.
    """

    dtype: torch.dtype
    members: tuple[int, ...]
    layout: Layout


@lru_cache(maxsize=4096)
def _parts(layout: Layout, dtypes: tuple[torch.dtype, ...]) -> tuple[_Part, ...]:
    """Tensors of each dtype, without empty ones."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for k, dtype in enumerate(dtypes):
        if layout.segments[k].chunk:
            by_dtype.setdefault(dtype, []).append(k)
    return tuple(
        _Part(dtype, tuple(members), Layout(layout.rows, layout.row_numel, tuple(layout.segments[k] for k in members)))
        for dtype, members in by_dtype.items()
    )


def copy(flat: Tensor, layout: Layout, sides: Sequence[Tensor], *, pack: bool, scale: float | None = None) -> None:
    """Copies contiguous tensors into the buffer `flat` (`pack`), or back, on the current stream.

    Arguments are checked by `graphshard.kernels.ops`; tensors of several dtypes take a launch each.

    Args:
        flat: `[rows * row_numel]`, contiguous.
        layout: of it.
        sides: the tensors.
        pack: from the tensors.
        scale: factor of what is packed, after it has been rounded to the buffer's dtype.
    """
    parts = _parts(layout, tuple([side.dtype for side in sides]))
    if not flat.is_cuda or flat.get_device() == torch.cuda.current_device():
        for part in parts:
            _launch(flat, part, sides, pack, scale)
        return
    with torch.cuda.device(flat.device):
        for part in parts:
            _launch(flat, part, sides, pack, scale)


def _launch(flat: Tensor, part: _Part, sides: Sequence[Tensor], pack: bool, scale: float | None) -> None:
    layout, dtype = part.layout, part.dtype
    addresses = tuple([sides[k].data_ptr() for k in part.members])
    if dtype == flat.dtype and scale is None:
        moved = _INTEGERS[dtype.itemsize]
        flat, side_type = flat.view(moved), _MOVED[moved]
    else:
        side_type = _CAST[dtype]
    table = _tables.get(flat.device, addresses, layout)
    copy_segments[(table.blocks.shape[0], layout.rows)](
        flat,
        table.segments,
        table.blocks,
        layout.row_numel,
        1.0 if scale is None else scale,
        side_type=side_type,
        pack=pack,
        scaled=scale is not None,
        strided=layout.strided,
        align=ALIGNED if table.aligned and flat.data_ptr() % ADDRESS_BYTES == 0 else 1,
        block_size=BLOCK,
        num_warps=NUM_WARPS,
    )
