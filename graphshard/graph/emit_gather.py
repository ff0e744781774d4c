"""The nodes of one gathered bucket: cast, flat copy-in, launch, wait, copy-out.

    %in = cat([%s0, %s1]);  %ag = all_gather_into_tensor(%in);  %w = wait_tensor(%ag)
    %a = reshape(split(view(%w, [W, -1]), 0))

Coalesced, there is no buffer to copy into or out of:

    %ag = all_gather_into_tensor_coalesced([%s0, %s1]);  %a = view(wait_tensor(%ag[0]));  %b = view(wait_tensor(%ag[1]))

Source: the buffer layout is FSDP2's, `[W, sum of shards]`, in bytes where members differ in dtype.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from graphshard.graph.builder import Builder
from graphshard.graph.ir import (
    ALL_GATHER,
    COALESCED_ALL_GATHER,
    WAIT,
    Collective,
    Member,
    aten,
    gathered_source,
    may_view,
    spec_of,
    val,
)
from graphshard.graph.markers import ShardSpec, padded_shape
from graphshard.graph.user_comms import CUSTOM_ALL_GATHER


def emit_gather(
    build: Builder,
    markers: Sequence[Node],
    bucket: str,
    unit: str,
    fqns: Sequence[str],
    custom: str,
    coalesced: bool = False,
) -> list[Node]:
    """Adds the nodes before `build`'s anchor; returns the gathered parameter of each marker.

    Args:
        build: adds the nodes.
        markers: unshards of one group, in bucket order.
        bucket: its name.
        unit: its unit.
        fqns: of the parameters.
        custom: key of the user's own all-gather, ``""`` if there is none.
        coalesced: whether the collective takes the shards one by one.
    """
    specs = [spec_of(marker) for marker in markers]
    world_size, group = specs[0].world_size, specs[0].group
    build.meta["role"] = "copy_in"
    shards = [_local(build, gathered_source(marker), spec) for marker, spec in zip(markers, specs, strict=True)]
    if world_size == 1:
        return [_alone(build, *triple) for triple in zip(markers, shards, specs, strict=True)]
    dtypes = [val(shard).dtype for shard in shards]
    wire = dtypes[0] if len(set(dtypes)) == 1 else torch.uint8
    numels = [val(shard).numel() for shard in shards]
    if coalesced:
        launch = build.call(COALESCED_ALL_GATHER, shards, world_size, group, role="launch")
        offsets = [sum(numels[:i]) for i in range(len(numels))]
        members = tuple(Member(*member) for member in zip(fqns, offsets, numels, dtypes, strict=True))
        launch.meta["collective"] = Collective("all_gather", bucket, unit, group, world_size, wire, None, members)
        parts = wait_each(build, launch)
        build.meta["role"] = "copy_out"
        return [_whole(build, part, spec) for part, spec in zip(parts, specs, strict=True)]
    if wire is torch.uint8 and len(shards) > 1:
        shards = [_viewed(build, shard, torch.uint8) for shard in shards]
    lengths = [val(shard).numel() for shard in shards]
    flat = build.call(aten.cat.default, list(shards)) if len(shards) > 1 else shards[0]
    if custom:
        launch = build.call(CUSTOM_ALL_GATHER, flat, world_size, custom, role="launch")
    else:
        launch = build.call(ALL_GATHER, flat, world_size, group, role="launch")
    offsets = [sum(lengths[:i]) for i in range(len(lengths))]
    members = tuple(Member(*member) for member in zip(fqns, offsets, numels, dtypes, strict=True))
    launch.meta["collective"] = Collective("all_gather", bucket, unit, group, world_size, wire, None, members)
    full = build.call(WAIT, launch, role="wait")
    build.meta["role"] = "copy_out"
    if len(shards) == 1:
        parts = [full]
    else:
        rows = build.reshape(full, [world_size, sum(lengths)])
        split = build.call(aten.split_with_sizes.default, rows, lengths, 1)
        parts = [build.contiguous_copy(build.call(operator.getitem, split, i)) for i in range(len(lengths))]
    parts = [_viewed(build, part, dtype) for part, dtype in zip(parts, dtypes, strict=True)]
    return [_whole(build, part, spec) for part, spec in zip(parts, specs, strict=True)]


def wait_each(build: Builder, launch: Node) -> list[Node]:
    """The waits for the results of a coalesced collective."""
    results = [build.call(operator.getitem, launch, i, role="wait") for i in range(len(val(launch)))]
    return [build.call(WAIT, result, role="wait") for result in results]


def _local(build: Builder, shard: Any, spec: ShardSpec) -> Node:
    """The shard in the dtype, and on the device, that is gathered."""
    if spec.device and spec.device != val(shard).device.type:
        options = {"device": torch.device(spec.device), "non_blocking": True}
        shard = build.call_with(aten._to_copy.default, (shard,), options)  # noqa: SLF001
    return build.cast(shard, spec.dtype)


def _viewed(build: Builder, node: Node, dtype: torch.dtype) -> Node:
    if val(node).dtype == dtype:
        return node
    if val(node).numel() == 0:  # its strides say nothing, and may not fit a wider dtype
        return build.cast(node, dtype)
    return build.call(aten.view.dtype, node, dtype)


def _whole(build: Builder, part: Node, spec: ShardSpec) -> Node:
    """A parameter from its shards `[W * N]`, in rank order, without padding."""
    padded = padded_shape(spec.size, spec.world_size, spec.dim)
    if spec.dim == 0:
        full = build.reshape(part, padded)
    else:
        length = padded[spec.dim] // spec.world_size
        shards = build.reshape(part, [spec.world_size, *padded[: spec.dim], length, *padded[spec.dim + 1 :]])
        order = [*range(1, spec.dim + 1), 0, *range(spec.dim + 1, len(padded) + 1)]
        full = build.reshape(build.contiguous_copy(build.call(aten.permute.default, shards, order)), padded)
    if padded == spec.size:
        return full
    return build.call(aten.slice.Tensor, full, spec.dim, 0, spec.size[spec.dim])


def _alone(build: Builder, marker: Node, shard: Node, spec: ShardSpec) -> Node:
    full = build.reshape(shard, spec.size)
    if shard is gathered_source(marker) and _escapes(marker):
        # A marker promises a fresh tensor: a result of the graph must not share memory with the parameter.
        full = build.call(aten.clone.default, full)
    return full


def _escapes(node: Node) -> bool:
    return any(user.op == "output" or (may_view(user) and _escapes(user)) for user in node.users)
