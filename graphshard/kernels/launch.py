"""Launches segmented copies: tables of addresses, made once for the same addresses, and one launch for each dtype."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import triton.language as tl
from torch import Tensor

from graphshard.kernels.segmented_copy import ADDRESS_BYTES, ALIGNED, BLOCK, COLUMNS, NUM_WARPS, copy_segments
from graphshard.kernels.segments import Layout, Segment, block_map

# What is only moved is moved as integers; a cast needs the dtype itself.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CAST = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_MOVED = {torch.int8: tl.int8, torch.int16: tl.int16, torch.int32: tl.int32, torch.int64: tl.int64}
# Addresses of gradients may differ from step to step, so tables are dropped again: the oldest use first.
_MOST_TABLES = 4096


class _Tables:
    """Tables on a device, by the stream that reads them and by the addresses and the layout that they hold."""

    def __init__(self) -> None:
        self._found: OrderedDict[object, tuple[Tensor, Tensor]] = OrderedDict()
        self._captured: list[Tensor] = []

    def get(
        self, device: torch.device, addresses: tuple[int, ...], segments: tuple[Segment, ...]
    ) -> tuple[Tensor, Tensor]:
        """`[K, 5]` int64 and `[B, 2]` int32 on `device`, the current one, for tensors at `addresses`."""
        if device.type != "cuda":
            return self._cached((addresses, segments), lambda: _host_tables(addresses, segments))
        if torch.cuda.is_current_stream_capturing():
            # Every replay copies them again: the host's stay, and the device's are the graph's scratch. None of the
            # others' is taken, and none is left to others: what a capture copies is not there before a replay.
            host = _pinned(_host_tables(addresses, segments))
            self._captured += host
            return _on(device, host)
        stream = torch.cuda.current_stream(device).cuda_stream  # another one is not behind the copy
        key = (device, stream, addresses, segments)
        return self._cached(key, lambda: _on(device, _pinned(_host_tables(addresses, segments))))

    def _cached(self, key: object, make: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        if (found := self._found.get(key)) is not None:
            self._found.move_to_end(key)
            return found
        found = self._found[key] = make()
        if len(self._found) > _MOST_TABLES:
            self._found.popitem(last=False)
        return found


def _host_tables(addresses: tuple[int, ...], segments: tuple[Segment, ...]) -> tuple[Tensor, Tensor]:
    rows = [(address, *segment) for address, segment in zip(addresses, segments, strict=True)]
    assert len(rows[0]) == COLUMNS
    return torch.tensor(rows, dtype=torch.int64), torch.tensor(block_map(segments, BLOCK), dtype=torch.int32)


def _pinned(tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Their copy waits for nothing, and the allocator keeps the host's memory until it is done."""
    return tables[0].pin_memory(), tables[1].pin_memory()


def _on(device: torch.device, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return tables[0].to(device, non_blocking=True), tables[1].to(device, non_blocking=True)


_tables = _Tables()


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
    by_dtype: dict[torch.dtype, list[int]] = {}
    for k, side in enumerate(sides):
        if side.numel() or (pack and layout.segments[k].chunk):
            by_dtype.setdefault(side.dtype, []).append(k)
    for dtype, members in by_dtype.items():
        _launch(flat, layout, [sides[k] for k in members], [layout.segments[k] for k in members], dtype, pack, scale)


def _launch(
    flat: Tensor,
    layout: Layout,
    sides: Sequence[Tensor],
    segments: Sequence[Segment],
    dtype: torch.dtype,
    pack: bool,
    scale: float | None,
) -> None:
    addresses = tuple(side.data_ptr() for side in sides)
    part = Layout(layout.rows, layout.row_numel, tuple(segments))
    if dtype == flat.dtype and scale is None:
        moved = _INTEGERS[dtype.itemsize]
        flat, side_type = flat.view(moved), _MOVED[moved]
    else:
        side_type = _CAST[dtype]
    aligned = part.alignment() >= ALIGNED and not any(a % ADDRESS_BYTES for a in (flat.data_ptr(), *addresses))
    with torch.cuda.device(flat.device) if flat.is_cuda else nullcontext():
        table, blocks = _tables.get(flat.device, addresses, part.segments)
        copy_segments[(blocks.shape[0], layout.rows)](
            flat,
            table,
            blocks,
            layout.row_numel,
            1.0 if scale is None else scale,
            side_type=side_type,
            pack=pack,
            scaled=scale is not None,
            strided=part.strided,
            align=ALIGNED if aligned else 1,
            block_size=BLOCK,
            num_warps=NUM_WARPS,
        )
