"""Writes of parameters whose unit's forward does not run, found in what Dynamo captures.

FSDP2 has shards of these: a write reaches the shards, and whatever is gathered of them later. In a graph it would be
of the gathered parameter alone, or of a tensor that the graph does not know to be a shard.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef

from graphshard.compat.tensors import plain_tensors, version
from graphshard.graph.ir import is_call

# ``x += y`` as Dynamo captures it.
_OPERATORS = frozenset(dir(operator))
_IN_PLACE = frozenset(name for name in _OPERATORS if name[0] == "i" and _OPERATORS & {name[1:], f"{name[1:]}_"})


def _elsewhere(full: Tensor) -> Tensor:
    return full


# Marks what is read of a parameter whose unit's forward does not run: itself.
ELSEWHERE = torch.compiler.allow_in_graph(_elsewhere)  # type: ignore[no-untyped-call]


def written_elsewhere(gm: GraphModule, inputs: Sequence[Any], is_parameter: Callable[[Any], bool]) -> list[int]:
    """Such parameters that a captured graph writes: positions of the inputs that they are, or whose shard they come
    from; -1 for one of a checkpoint region.

    Args:
        gm: with the checkpoint regions inside it.
        inputs: its example inputs.
        is_parameter: whether an input is a sharded parameter, as FSDP2 has registered it.
    """
    arguments = gm.graph.find_nodes(op="placeholder")
    place = {node: at for at, node in enumerate(arguments)}
    shards = {node for node, value in zip(arguments, inputs, strict=True) if is_parameter(value)}
    found: list[int] = []
    for graph in _graphs(gm):
        if asked := [node for node in graph.nodes if node in shards or is_call(node, ELSEWHERE)]:
            wrapped = {key for node in graph.nodes if _wraps(node) for key in _memory(node)}
            nodes = [node for node in graph.nodes if _is_written(node, wrapped)]
            nodes += [one for node in graph.nodes for one in _written_arguments(node)]
            written = {key for node in nodes for key in _memory(node)}
            found += [place.get(_source(node), -1) for node in asked if not written.isdisjoint(_memory(node))]
    return found


def _source(node: Node) -> Node:
    while node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def without_marks(gm: GraphModule) -> None:
    """Takes `ELSEWHERE` out of a captured graph, in place."""
    for graph in _graphs(gm):
        for node in [node for node in graph.nodes if is_call(node, ELSEWHERE)]:
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
    gm.recompile()


def _graphs(gm: GraphModule) -> Iterator[Graph]:
    return (inner.graph for inner in gm.modules() if isinstance(inner, GraphModule))


def _wraps(node: Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, Tensor) and all(part is not value for part in plain_tensors(value))


def _memory(node: Node) -> set[StorageWeakRef]:
    value = node.meta.get("example_value")
    return {StorageWeakRef(part.untyped_storage()) for part in plain_tensors(value)}  # type: ignore[no-untyped-call]


def _is_written(node: Node, wrapped: set[StorageWeakRef]) -> bool:
    """Whether a node's result was written. `wrapped`: memory of what tensor subclasses wrap, whose versions begin
    anywhere: there the node itself is the write.
    """
    value = node.meta.get("example_value")
    if not isinstance(value, Tensor):
        return False
    if not _wraps(node) and not wrapped.isdisjoint(_memory(node)):
        if node.op not in ("call_method", "call_function"):
            return False
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        return "out" in node.kwargs or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    return version(value) > 0


def _written_arguments(node: Node) -> list[Node]:
    """What ``x[i] = y`` and ``_foreach_..._`` write: the first has no result, and of lists of tensor subclasses torch
    counts no version.
    """
    name = getattr(node.target, "__name__", "")
    if node.target is operator.setitem or (name.startswith("_foreach_") and name.endswith("_")):
        first = node.args[0]
        return [one for one in (first if isinstance(first, (list, tuple)) else [first]) if isinstance(one, Node)]
    return []
