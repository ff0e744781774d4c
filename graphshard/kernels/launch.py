"""Launches segmented copies: tables of addresses, made once for the same addresses, and one launch for each dtype."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

import torch
import triton.language as tl
from torch import Tensor

from graphshard.kernels.segmented_copy import ADDRESS_BYTES, ALIGNED, BLOCK, COLUMNS, NUM_WARPS, copy_segments
from graphshard.kernels.segments import Layout, block_map

T = TypeVar("T")

# What is only moved is moved as integers; a cast needs the dtype itself.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CAST = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_MOVED = {torch.int8: tl.int8, torch.int16: tl.int16, torch.int32: tl.int32, torch.int64: tl.int64}
# Addresses of gradients may differ from step to step, so tables are dropped again: the oldest use first.
_MOST_TABLES = 4096


class _Segments(NamedTuple):
    """What a launch reads of its tensors.

    Attributes:
        table: int64 `[K, 5]`.
        aligned: whether addresses and numbers of elements let the kernel move 16 bytes at a time.
    """

    table: Tensor
    aligned: bool


class _Kept(Generic[T]):
    """What was made for a key, until enough others were used."""

    def __init__(self) -> None:
        self.found: OrderedDict[object, T] = OrderedDict()

    def get(self, key: object, make: Callable[[], T]) -> T:
        if (found := self.found.get(key)) is not None:
            self.found.move_to_end(key)
            return found
        made = self.found[key] = make()
        if len(self.found) > _MOST_TABLES:
            self.found.popitem(last=False)
        return made


class _Tables:
    """Tables on a device, by the stream that reads them: segments of a layout at addresses, and blocks of a layout,
    which takes far longer to make.
    """

    def __init__(self) -> None:
        self.segments, self.blocks = _Kept[_Segments](), _Kept[Tensor]()
        self._captured: list[Tensor] = []

    def get(self, device: torch.device, addresses: tuple[int, ...], layout: Layout) -> tuple[_Segments, Tensor]:
        """Segments and blocks, int32 `[B, 2]`, on `device`, the current one, for tensors at `addresses`."""
        where: tuple[object, ...] = (device,)
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return self._in_capture(device, addresses, layout)
            where = device, torch.cuda.current_stream(device).cuda_stream  # another one is not behind the copy
        segments = self.segments.get((*where, addresses, layout), lambda: _segments(device, addresses, layout))
        return segments, self.blocks.get((*where, layout), lambda: _on(device, block_map(layout.segments, BLOCK)))

    def _in_capture(self, device: torch.device, addresses: tuple[int, ...], layout: Layout) -> tuple[_Segments, Tensor]:
        """Every replay copies them again: the host's stay, and the device's are the graph's scratch. None of the
        others' is taken, and none is left to others: what a capture copies is not there before a replay.
        """
        host = _segments(torch.device("cpu"), addresses, layout)
        kept = [tensor.pin_memory() for tensor in (host.table, block_map(layout.segments, BLOCK))]
        self._captured += kept
        table, blocks = (tensor.to(device, non_blocking=True) for tensor in kept)
        return _Segments(table, host.aligned), blocks


def _segments(device: torch.device, addresses: tuple[int, ...], layout: Layout) -> _Segments:
    rows = [(address, *segment) for address, segment in zip(addresses, layout.segments, strict=True)]
    assert len(rows[0]) == COLUMNS
    aligned = layout.alignment >= ALIGNED and not any(address % ADDRESS_BYTES for address in addresses)
    return _Segments(_on(device, torch.tensor(rows, dtype=torch.int64, device="cpu")), aligned)


def _on(device: torch.device, table: Tensor) -> Tensor:
    """The copy of pinned memory waits for nothing, and the allocator keeps the host's until it is done."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


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
    segments, blocks = _tables.get(flat.device, addresses, layout)
    copy_segments[(blocks.shape[0], layout.rows)](
        flat,
        segments.table,
        blocks,
        layout.row_numel,
        1.0 if scale is None else scale,
        side_type=side_type,
        pack=pack,
        scaled=scale is not None,
        strided=layout.strided,
        align=ALIGNED if segments.aligned and flat.data_ptr() % ADDRESS_BYTES == 0 else 1,
        block_size=BLOCK,
        num_warps=NUM_WARPS,
    )
