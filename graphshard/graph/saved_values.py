"""What a forward saves for its backward."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from graphshard.graph.builder import Builder
from graphshard.graph.ir import aten, is_call, may_view


def save_before_writes(forward: GraphModule, num_outputs: int) -> None:
    """Has a forward save copies of what it saves of inputs that it writes: backward comes behind the writes.

    AOTAutograd's graphs write inputs at their end, by `copy_`, and the partitioner prefers to save inputs: they are
    there anyway. Plain `torch.compile` computes gradients with what was written (seen with torch 2.13).

    Args:
        forward: that the partitioner made; changed in place.
        num_outputs: of its outputs, those that are not saved values.
    """
    graph = forward.graph
    written = {_memory_of(node.args[0]) for node in graph.nodes if is_call(node, aten.copy_.default)}
    if not written:
        return
    output = next(iter(graph.find_nodes(op="output")))
    results: Any = output.args[0]
    kept = list(results)
    for at, saved in enumerate(results[num_outputs:], num_outputs):
        if isinstance(saved, Node) and _memory_of(saved) in written:
            first = next(node for node in graph.nodes if node.op != "placeholder")
            kept[at] = Builder(graph, first if saved.op == "placeholder" else saved.next).call(
                aten.clone.default, saved
            )
    output.args = (type(results)(kept),)
    forward.recompile()


def _memory_of(node: object) -> object:
    """The node that made the memory in which a node's value is."""
    while isinstance(node, Node) and may_view(node):
        node = node.args[0]
    return node
