"""Which memory each value of a graph lies in: views and waits share that of what they come from."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from graphshard.ir import WAIT, is_call, may_view


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
    returns = getattr(getattr(node.target, "_schema", None), "returns", ())
    if any(result.alias_info for result in returns) or not isinstance(value, Tensor) or not isinstance(whole, Tensor):
        return True
    try:  # a reshape
        with torch.no_grad():
            whole.view(value.shape)
    except (RuntimeError, ValueError):
        return False
    return True
