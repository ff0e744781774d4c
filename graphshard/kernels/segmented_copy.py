"""The one Triton kernel of all copies between tensors and a flat buffer `[W, S]`.

Each tensor has a segment of `chunk` elements in every row of the buffer. Its element `i` in row `w` is

    tensor[i // inner * stride + w * inner + i % inner]        if  w * inner + i % inner < stride

which for a tensor sharded on dim 0 (`inner` is the chunk, `stride` the whole tensor) is an interval, and for a later
dim the shard's part of each row of the tensor. What is behind the tensor's end is padding: zero in the buffer, never
written in a tensor.

Source: segmented copies by pointer table, as in multi-tensor-apply.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

# Elements of one block, and its warps: 4 KiB to 16 KiB in flight in each.
BLOCK = 4096
NUM_WARPS = 8
# Numbers of elements are a multiple of this in the aligned form, and addresses of 16 bytes: 128-bit loads and stores.
ALIGNED = 8
ADDRESS_BYTES = 16
# int64 columns of a segment: address, offset in a row, chunk, inner, stride.
COLUMNS = 5


@triton.jit
def copy_segments(
    flat,
    segments,
    blocks,
    row_numel,
    scale,
    side_type: tl.constexpr,
    pack: tl.constexpr,
    scaled: tl.constexpr,
    strided: tl.constexpr,
    align: tl.constexpr,
    block_size: tl.constexpr,
):
    """Copies block `program_id(0)` of row `program_id(1)`, from tensors into `flat` (`pack`) or back.

    Args:
        flat: the buffer, `[W, row_numel]`.
        segments: int64 `[K, 5]`.
        blocks: int32 `[B, 2]`: segment, and number of the block in it.
        row_numel: elements of a row.
        scale: fp32 factor: applied to what is rounded to the buffer's dtype, as torch's own ops do.
        side_type: element type of the tensors.
        pack: from the tensors.
        scaled: whether there is a factor.
        strided: whether some tensor is sharded on a dim behind its first.
        align: every number of elements is a multiple of it; above 1, addresses are of 16 bytes.
        block_size: elements of a block.
    """
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    segment = segments + tl.load(blocks + 2 * block).to(tl.int64) * 5
    start = tl.load(blocks + 2 * block + 1).to(tl.int64) * block_size
    side = tl.load(segment).to(tl.pointer_type(side_type))
    offset = tl.load(segment + 1)
    chunk = tl.load(segment + 2)
    inner = tl.load(segment + 3)
    stride = tl.load(segment + 4)
    if align > 1:  # every value in an address or a mask must be known to be aligned, or accesses are scalar
        side = tl.multiple_of(side, 16)
        offset = tl.multiple_of(offset, align)
        chunk = tl.multiple_of(chunk, align)
        inner = tl.multiple_of(inner, align)
        stride = tl.multiple_of(stride, align)
    lanes = tl.arange(0, block_size)
    inside = lanes < chunk - start
    if strided:
        # Aligned: lanes of one group are in one row of the tensor, which the compiler cannot see in a quotient.
        group = (start + lanes // align * align) // inner
        column = row * inner + (start + lanes) - group * inner
        place = group * stride + column
        if align > 1:
            column = tl.max_contiguous(tl.multiple_of(column, align), align)
            place = tl.max_contiguous(tl.multiple_of(place, align), align)
        valid = inside & (column < stride)
    else:
        begin = row * inner + start
        valid = inside & (lanes < stride - begin)
        place = begin + lanes
    there = flat + row * row_numel + offset + start + lanes
    if pack:
        value = tl.load(side + place, mask=valid, other=0, cache_modifier=".cg").to(flat.dtype.element_ty)
        if scaled:
            value = (value.to(tl.float32) * scale).to(flat.dtype.element_ty)
        tl.store(there, value, mask=inside)
    else:
        tl.store(side + place, tl.load(there, mask=valid, other=0, cache_modifier=".cg").to(side_type), mask=valid)
