"""Which memory each value of a graph lies in, and for how long: views and waits share that of what they come from."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from graphshard.compat.tensors import size_hint
from graphshard.cost.traffic import UNBACKED_SIZE
from graphshard.graph.ir import WAIT, PassContext, declares_view, is_call, launches, may_view, val, waits_of


class Allocation(NamedTuple):
    """What a node allocates: its result, or one of its results."""

    node: Node
    place: int | None


def value_of(value: Any, index: int | None) -> Tensor:
    """`value`, or one of the results that it holds."""
    result: Tensor = value if index is None else value[index]
    return result


def allocations_of(graph: Graph) -> dict[Node, list[Allocation]]:
    """What each node's result lies in."""
    found: dict[Node, list[Allocation]] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        source = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        if source is not None and (is_call(node, WAIT) or _is_view(node, source)):
            inside = found[source]
            if node.target is operator.getitem and len(inside) > 1:
                inside = [allocation for allocation in inside if allocation.place == node.args[1]]
            found[node] = inside
        elif isinstance(value, Tensor):
            found[node] = [Allocation(node, None)]
        elif isinstance(value, (list, tuple)):
            found[node] = [Allocation(node, i) for i, one in enumerate(value) if isinstance(one, Tensor)]
        else:
            found[node] = []
    return found


def _is_view(node: Node, source: Node) -> bool:
    if not may_view(node):
        return False
    value, whole = node.meta.get("val"), source.meta.get("val")
    if declares_view(node.target) or not isinstance(value, Tensor) or not isinstance(whole, Tensor):
        return True
    try:  # a reshape
        with torch.no_grad():
            whole.view(value.shape)
    except (RuntimeError, ValueError):
        return False
    return True


def bytes_of(allocation: Allocation) -> int:
    """Bytes of an allocation; symbolic sizes are those that were traced."""
    return size_hint(value_of(val(allocation.node), allocation.place).untyped_storage().nbytes(), UNBACKED_SIZE)


def live_ranges(
    graph: Graph, stays: Callable[[Node], bool], allocations: dict[Node, list[Allocation]] | None = None
) -> dict[Allocation, tuple[int, int]]:
    """The live range of each allocation: the places in the graph from which and to which it is there.

    Args:
        graph: with collectives, markers, or neither. A collective reads its input until it is awaited.
        stays: whether an argument is there to the end, because the caller holds it.
        allocations: of the graph, where they are known.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    allocations = allocations_of(graph) if allocations is None else allocations
    last = len(place) - 1
    end: dict[Allocation, int] = {}
    for node, found in allocations.items():
        for allocation in found:
            end[allocation] = max(end.get(allocation, 0), place[node], *(place[user] for user in node.users))
    for launch in launches(graph):
        wait = max((place[wait] for wait in waits_of(launch)), default=place[launch])
        for source in launch.all_input_nodes:
            for allocation in allocations[source]:
                end[allocation] = max(end[allocation], wait)
    ranges = {}
    for allocation, stop in end.items():
        argument = allocation.node.op == "placeholder"
        stop = last if argument and stays(allocation.node) else stop
        ranges[allocation] = (0 if argument else place[allocation.node], stop)
    return ranges


def live_bytes(ranges: dict[Allocation, tuple[int, int]], count: int) -> list[int]:
    """What is allocated at each of `count` places."""
    changes = [0] * (count + 1)
    for allocation, (start, stop) in ranges.items():
        num_bytes = bytes_of(allocation)
        changes[start] += num_bytes
        changes[stop + 1] -= num_bytes
    return list(accumulate(changes[:count]))


def held_by_caller(ctx: PassContext) -> Callable[[Node], bool]:
    """Which arguments outlive the program: all of a forward's; of a backward's the shards, not what forward saved."""
    shards = set(ctx.params)
    return lambda node: ctx.direction != "backward" or node.name in shards


def peak_bytes(graph: Graph, ctx: PassContext) -> int:
    """Most that a lowered program allocates, arguments included."""
    return max(live_bytes(live_ranges(graph, held_by_caller(ctx)), len(graph.nodes)))
