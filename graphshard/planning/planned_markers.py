"""Which markers of a graph a plan is about: parameters to gather, gradients to reduce."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Graph, Node

from graphshard.graph.ir import (
    PassContext,
    bucket_key,
    member_names,
    output_args,
    reductions,
    shard_placeholder,
    spec_of,
    unshards,
)


@dataclass(frozen=True)
class PlannedMarkers:
    """Markers whose collectives a plan may join and move.

    Attributes:
        gathers, reductions: by the name that plans call them, in graph order.
        key: of each marker; markers of one key may share a bucket.
        unit: name of each one's unit.
    """

    gathers: Mapping[str, Node]
    reductions: Mapping[str, Node]
    key: Mapping[Node, int]
    unit: Mapping[Node, str]


def planned_markers(graph: Graph, ctx: PassContext) -> PlannedMarkers:
    """Those that move something; of the reductions, those whose results leave the program."""
    gathers = {name: node for name, node in member_names(unshards(graph), ctx).items() if spec_of(node).world_size > 1}
    results = {result for result in output_args(graph) if isinstance(result, Node)}
    reduced = {
        name: node
        for name, node in member_names(reductions(graph), ctx).items()
        if _moves(node, ctx) and node in results and all(user.op == "output" for user in node.users)
    }
    numbers: dict[object, int] = {}
    markers = [*gathers.values(), *reduced.values()]
    key = {node: numbers.setdefault(bucket_key(node, ctx), len(numbers)) for node in markers}
    return PlannedMarkers(gathers, reduced, key, {node: _unit(node, ctx) for node in markers})


def _moves(reduction: Node, ctx: PassContext) -> bool:
    spec = spec_of(reduction)
    return spec.world_size > 1 or (spec.replicas > 1 and ctx.flags.settings(_unit(reduction, ctx)).all_reduce)


def _unit(marker: Node, ctx: PassContext) -> str:
    return ctx.params[shard_placeholder(marker).name].unit
