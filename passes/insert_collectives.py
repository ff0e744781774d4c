"""Turns markers into collectives: cast, flat copy-in, launch, wait, copy-out.

Needs: a graph with markers; those with one ``meta["bucket"]`` share a collective, any other gets its own. Leaves: no
marker. A gather stands where the first of its parameters is used, a reduction where the last of its gradients is
ready.

    %a = unshard(%s0)            %in = cat([%s0, %s1])                    # copy-in
    %b = unshard(%s1)     ->     %ag = all_gather_into_tensor(%in)        # launch
                                 %w = wait_tensor(%ag)
                                 %a = reshape(split(view(%w, [W, -1]), 0))  # copy-out

Dim 0 is padded per parameter, so that every rank's part is equal. Launches are out of place: with ``_out`` variants
Inductor reuses the input before the wait. With one rank a gather is a cast or a view and a reduction a cast.
Source: the buffer layout is FSDP2's, `[W, sum of shards]`.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from graphshard.ir import (
    ALL_GATHER,
    REDUCE_SCATTER,
    WAIT,
    Builder,
    Collective,
    Member,
    PassContext,
    aten,
    is_call,
    may_view,
    replace,
    shard_placeholder,
    spec_of,
    val,
)
from graphshard.markers import REDUCE_GRAD, UNSHARD, padded_shape, reduce_ops


@dataclass(frozen=True)
class Insertion:
    """One collective to insert: its bucket, markers in bucket order, their FQNs, and the marker that it is placed
    at.
    """

    bucket: str
    markers: tuple[str, ...]
    fqns: tuple[str, ...]
    anchor: str


@dataclass(frozen=True)
class CollectivesEdit:
    """Every collective to insert."""

    insertions: tuple[Insertion, ...]

    def __bool__(self) -> bool:
        return bool(self.insertions)


def decide(graph: Graph, ctx: PassContext) -> CollectivesEdit:
    """Collects the buckets in graph order."""
    buckets: dict[str, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if is_call(node, UNSHARD) or is_call(node, REDUCE_GRAD):
            name, _ = node.meta.get("bucket", (node.name, 0))
            buckets[name].append(node)
    insertions = []
    for bucket, nodes in buckets.items():
        anchor = nodes[0] if is_call(nodes[0], UNSHARD) else nodes[-1]
        nodes.sort(key=lambda node: node.meta.get("bucket", ("", 0))[1])
        fqns = tuple(ctx.params[shard_placeholder(node).name].fqn for node in nodes)
        insertions.append(Insertion(bucket, tuple(node.name for node in nodes), fqns, anchor.name))
    return CollectivesEdit(tuple(insertions))


def apply(graph: Graph, edit: CollectivesEdit) -> None:
    """Inserts what `edit` names, then erases the markers."""
    by_name = {node.name: node for node in graph.nodes}
    done: list[Node] = []
    for insertion in edit.insertions:
        markers = [by_name[name] for name in insertion.markers]
        insert = _insert_gather if is_call(markers[0], UNSHARD) else _insert_reduction
        results = insert(Builder(graph, by_name[insertion.anchor], bucket_of=insertion.bucket), markers, insertion)
        for marker, result in zip(markers, results, strict=True):
            replace(marker, result)
        done += markers
    for marker in done:  # last: they are the anchors
        graph.erase_node(marker)


def _members(fqns: tuple[str, ...], numels: list[int]) -> tuple[Member, ...]:
    offsets = [sum(numels[:i]) for i in range(len(numels))]
    return tuple(Member(*member) for member in zip(fqns, offsets, numels, strict=True))


def _insert_gather(build: Builder, markers: list[Node], insertion: Insertion) -> list[Node]:
    spec = spec_of(markers[0])
    dtype, world_size, group = spec.dtype, spec.world_size, spec.group
    sizes = [spec_of(marker).size for marker in markers]
    build.meta["role"] = "copy_in"
    shards = [build.cast(marker.args[0], dtype) for marker in markers]
    if world_size == 1:
        return [_unshard_alone(build, *triple) for triple in zip(markers, shards, sizes, strict=True)]
    numels = [val(shard).numel() for shard in shards]
    flat = build.call(aten.cat.default, shards) if len(shards) > 1 else shards[0]
    launch = build.call(ALL_GATHER, flat, world_size, group, role="launch")
    launch.meta["collective"] = Collective(
        "all_gather", insertion.bucket, group, world_size, dtype, None, _members(insertion.fqns, numels)
    )
    full = build.call(WAIT, launch, role="wait")
    build.meta["role"] = "copy_out"
    if len(shards) == 1:
        parts = [full]
    else:
        rows = build.reshape(full, [world_size, sum(numels)])
        split = build.call(aten.split_with_sizes.default, rows, numels, 1)
        parts = [build.contiguous_copy(build.call(operator.getitem, split, i)) for i in range(len(numels))]
    return [
        _unpad(build, build.reshape(part, padded_shape(size, world_size)), size)
        for part, size in zip(parts, sizes, strict=True)
    ]


def _unpad(build: Builder, padded: Node, size: tuple[int, ...]) -> Node:
    return padded if val(padded).shape[0] == size[0] else build.call(aten.slice.Tensor, padded, 0, 0, size[0])


def _unshard_alone(build: Builder, marker: Node, shard: Node, size: tuple[int, ...]) -> Node:
    full = build.reshape(shard, size)
    if shard is marker.args[0] and _escapes(marker):
        # A marker promises a fresh tensor: a result of the graph must not share memory with the parameter.
        full = build.call(aten.clone.default, full)
    return full


def _escapes(node: Node) -> bool:
    return any(user.op == "output" or (may_view(user) and _escapes(user)) for user in node.users)


def _insert_reduction(build: Builder, markers: list[Node], insertion: Insertion) -> list[Node]:
    spec = spec_of(markers[0])
    reduce_dtype, world_size, group = spec.reduce_dtype, spec.world_size, spec.group
    dtype = val(markers[0]).dtype
    build.meta["role"] = "copy_in"
    rows = [_grad_rows(build, marker.args[0], reduce_dtype, world_size) for marker in markers]
    numels = [val(row).numel() // world_size for row in rows]
    flat = build.reshape(
        build.call(aten.cat.default, rows, 1) if len(rows) > 1 else rows[0], [sum(numels) * world_size]
    )
    ops = reduce_ops(reduce_dtype, world_size)
    flat = _divide(build, flat, ops.predivide)
    if world_size == 1:
        reduced = flat
    else:
        launch = build.call(REDUCE_SCATTER, flat, ops.op, world_size, group, role="launch")
        launch.meta["collective"] = Collective(
            "reduce_scatter",
            insertion.bucket,
            group,
            world_size,
            reduce_dtype,
            ops.op,
            _members(insertion.fqns, numels),
        )
        reduced = build.call(WAIT, launch, role="wait")
    build.meta["role"] = "copy_out"
    reduced = build.cast(_divide(build, reduced, ops.postdivide), dtype)
    if len(markers) == 1:
        # A marker promises a fresh tensor: with one rank and no cast, two gradients could be one tensor.
        return [build.contiguous_copy(reduced) if _reshapes(reduced, markers[0].args[0]) else reduced]
    split = build.call(aten.split_with_sizes.default, reduced, numels)
    return [build.call(operator.getitem, split, i) for i in range(len(numels))]


def _reshapes(node: Node, source: Any) -> bool:
    """Whether `node` is `source` in another shape."""
    while node is not source and node.target is aten.reshape.default:
        node = node.all_input_nodes[0]
    return node is source


def _grad_rows(build: Builder, grad: Any, reduce_dtype: Any, world_size: int) -> Node:
    """`grad` cast, padded on dim 0 and viewed as `[W, its shard]`."""
    grad = build.cast(grad, reduce_dtype)
    shape = tuple(val(grad).shape)
    padding = padded_shape(shape, world_size)[0] - shape[0]
    if padding:
        grad = build.call(aten.constant_pad_nd.default, grad, [0, 0] * (len(shape) - 1) + [0, padding])
    return build.reshape(grad, [world_size, math.prod(padded_shape(shape, world_size)) // world_size])


def _divide(build: Builder, node: Node, divisor: float | None) -> Node:
    return node if divisor is None else build.call(aten.div.Tensor, node, divisor)
