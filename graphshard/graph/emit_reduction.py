"""The nodes of one reduced bucket: cast, flat copy-in, reduce-scatter over the shards, all-reduce over their copies,
copy-out.

    %in = cat([view(%g0, [W, -1]), view(%g1, [W, -1])], 1);  %rs = reduce_scatter_tensor(%in);  %w = wait_tensor(%rs)
    %ar = all_reduce(%w);  %v = wait_tensor(%ar);  %r0, %r1 = split(%v)

Coalesced, there is no buffer: %rs = reduce_scatter_tensor_coalesced([view(%g0, [-1]), view(%g1, [-1])]), a wait each.

Source: FSDP2's `foreach_reduce`: the layout of its buffer, its operators and where it divides decide the bits.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from graphshard.fsdp2.settings import UnitSettings
from graphshard.graph.builder import Builder
from graphshard.graph.emit_gather import wait_each
from graphshard.graph.ir import (
    ALL_REDUCE,
    COALESCED_REDUCE_SCATTER,
    REDUCE_SCATTER,
    WAIT,
    Collective,
    Kind,
    Member,
    aten,
    spec_of,
    val,
)
from graphshard.graph.markers import ReduceOps, padded_shape, reduce_ops
from graphshard.graph.user_comms import ALL_REDUCE_HOOK, CUSTOM_REDUCE_SCATTER

ALL_REDUCE_BUCKET = "/all_reduce"  # behind a bucket's name: its second collective


def emit_reduction(
    build: Builder,
    markers: Sequence[Node],
    bucket: str,
    unit: str,
    fqns: Sequence[str],
    settings: UnitSettings,
    partials: Sequence[Node | None],
    coalesced: bool = False,
) -> list[Node]:
    """Adds the nodes before `build`'s anchor; returns the gradient of each marker's shard.

    Args:
        build: adds the nodes.
        markers: reductions of one group and dtype, in bucket order.
        bucket: its name.
        unit: its unit.
        fqns: of the parameters.
        settings: of the unit. Without `all_reduce`, the results are partial: reduced over the shards only, in the
            reduce dtype.
        partials: of each marker, what an earlier backward left partial.
        coalesced: whether the collective takes the gradients one by one; none follows it.
    """
    spec, dtype = spec_of(markers[0]), val(markers[0]).dtype
    world_size, reduce_dtype = spec.world_size, spec.reduce_dtype
    ops = reduce_ops(reduce_dtype, world_size, spec.replicas, settings.divide_factor, settings.force_sum)
    build.meta["role"] = "copy_in"
    dims = [spec_of(marker).dim for marker in markers]
    rows = [
        rows_of(build, build.cast(marker.args[0], reduce_dtype), world_size, dim)
        for marker, dim in zip(markers, dims, strict=True)
    ]
    numels = [val(row).numel() // world_size for row in rows]
    members = tuple(Member(fqn, sum(numels[:i]), numels[i], reduce_dtype) for i, fqn in enumerate(fqns))
    if coalesced:
        grads = [_scaled(build, build.reshape(row, [-1]), ops) for row in rows]
        group = settings.scatter_group or spec.group
        node = build.call(COALESCED_REDUCE_SCATTER, grads, ops.scatter, world_size, group, role="launch")
        about = Collective("reduce_scatter", bucket, unit, spec.group, world_size, reduce_dtype, ops.scatter, members)
        node.meta["collective"] = about
        reduced = wait_each(build, node)
        build.meta["role"] = "copy_out"
        return [_to_grads(build, one, ops, dtype, val(markers[0]).device) for one in reduced]
    flat = build.call(aten.cat.default, rows, 1) if len(rows) > 1 else rows[0]
    flat = _scaled(build, build.reshape(flat, [sum(numels) * world_size]), ops)

    def launched(kind: Kind, name: str, group: str, ranks: int, op: str, node: Node) -> Node:
        node.meta["collective"] = Collective(kind, name, unit, group, ranks, reduce_dtype, op, members)
        return build.call(WAIT, node, role="wait")

    if world_size > 1:
        if settings.custom_reduce_scatter:
            key = settings.custom_reduce_scatter
            node = build.call(CUSTOM_REDUCE_SCATTER, flat, ops.scatter, world_size, key, role="launch")
        else:
            group = settings.scatter_group or spec.group
            node = build.call(REDUCE_SCATTER, flat, ops.scatter, world_size, group, role="launch")
        flat = launched("reduce_scatter", bucket, spec.group, world_size, ops.scatter, node)
    if spec.replicas > 1 and settings.all_reduce:
        if world_size > 1:
            build.meta["bucket_of"] = bucket + ALL_REDUCE_BUCKET
        build.meta["role"] = "copy_in"
        flat = _added(build, flat, numels, partials)
        node = build.call(ALL_REDUCE, flat, ops.reduce, spec.replicate_group, role="launch")
        name = build.meta["bucket_of"]
        flat = launched("all_reduce", name, spec.replicate_group, spec.replicas, ops.reduce, node)
    build.meta["role"] = "copy_out"
    if spec.replicas > 1 and not settings.all_reduce:
        flat = _added(build, flat, numels, partials)
    else:
        if settings.all_reduce_hook:
            flat = build.call(ALL_REDUCE_HOOK, flat, settings.all_reduce_hook)
        flat = _to_grads(build, flat, ops, dtype, val(markers[0]).device)
    if len(markers) == 1:
        # A marker promises a fresh tensor: with one rank and no cast, two gradients could be one tensor.
        return [build.contiguous_copy(flat) if _reshapes(flat, markers[0].args[0]) else flat]
    split = build.call(aten.split_with_sizes.default, flat, numels)
    return [build.call(operator.getitem, split, i) for i in range(len(numels))]


def rows_of(build: Builder, full: Node, world_size: int, dim: int) -> Node:
    """A full tensor as `[W, elements of a shard]`: `dim` padded, the shards in rank order."""
    shape = tuple(val(full).shape)
    padded = padded_shape(shape, world_size, dim)
    if padded != shape:
        padding = [0, 0] * (len(shape) - dim - 1) + [0, padded[dim] - shape[dim]]
        full = build.call(aten.constant_pad_nd.default, full, padding)
    if dim > 0 and world_size > 1:
        length = padded[dim] // world_size
        full = build.reshape(full, [*padded[:dim], world_size, length, *padded[dim + 1 :]])
        order = [dim, *range(dim), *range(dim + 1, len(padded) + 1)]
        full = build.contiguous_copy(build.call(aten.permute.default, full, order))
    return build.reshape(full, [world_size, math.prod(padded) // world_size])


def _scaled(build: Builder, flat: Node, ops: ReduceOps) -> Node:
    if ops.premultiply is not None:
        return build.call(aten.mul.Tensor, flat, ops.premultiply)
    return flat if ops.predivide is None else build.call(aten.div.Tensor, flat, ops.predivide)


def _added(build: Builder, flat: Node, numels: Sequence[int], partials: Sequence[Node | None]) -> Node:
    """`flat` plus what earlier backwards left partial."""
    if not any(partials):
        return flat
    terms = [
        build.call(aten.new_zeros.default, flat, [numel]) if partial is None else partial
        for partial, numel in zip(partials, numels, strict=True)
    ]
    return build.call(aten.add.Tensor, flat, build.call(aten.cat.default, terms) if len(terms) > 1 else terms[0])


def _to_grads(build: Builder, flat: Node, ops: ReduceOps, dtype: torch.dtype, device: torch.device) -> Node:
    if ops.postdivide is not None:
        flat = build.call(aten.div.Tensor, flat, ops.postdivide)
    flat = build.cast(flat, dtype)
    if val(flat).device.type != device.type:
        flat = build.call_with(aten._to_copy.default, (flat,), {"device": device})  # noqa: SLF001
    return flat


def _reshapes(node: Node, source: Any) -> bool:
    """Whether `node` is `source` in another shape."""
    while node is not source and node.target is aten.reshape.default:
        node = node.all_input_nodes[0]
    return node is source
