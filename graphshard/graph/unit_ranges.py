"""Which unit a program computes: names for traces of profilers.

A graph has no modules any more, and equal blocks are traced once. So an operator is counted to the unit whose parameter
was read last before it.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Graph, Node

from graphshard.compat.tensors import is_torch_operator
from graphshard.graph.ir import PassContext, is_call, is_marker, may_view, shard_placeholder
from graphshard.graph.markers import UNSHARD

_UNIT = "unit"
_ROOT = "root"


def mark_units(graph: Graph, ctx: PassContext) -> None:
    """Notes the unit on each operator of a marked graph; passes move operators, and keep what is noted.

    Args:
        graph: its nodes get ``meta["unit"]``, ``"root"`` for the root's.
        ctx: of its parameters.
    """
    parameters: dict[Node, str] = {}  # and views of them
    waiting: list[Node] = []  # before the first parameter
    unit = ""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if is_call(node, UNSHARD):
            parameters[node] = ctx.params[shard_placeholder(node).name].unit or _ROOT
        if is_marker(node):
            continue
        read = [parameters[source] for source in node.all_input_nodes if source in parameters]
        if read and may_view(node):
            parameters[node] = read[0]
        unit = read[0] if read else unit
        if unit:
            node.meta[_UNIT] = unit
        else:
            waiting.append(node)
        if unit and waiting:
            for early in waiting:
                early.meta[_UNIT] = unit
            waiting.clear()


def units_of(nodes: Iterable[Node]) -> str:
    """The units that some operators compute, as buckets are named: ``"layers.0"``, ``"layers.0..layers.2"``, ``""``."""
    found = list(dict.fromkeys(node.meta[_UNIT] for node in nodes if _UNIT in node.meta))
    return "..".join(found if len(found) < 2 else (found[0], found[-1]))


def operators_of_units(graph: Graph) -> tuple[tuple[object, str], ...]:
    """(operator, unit) of what a program computes, in order."""
    return tuple(
        (node.target, node.meta[_UNIT]) for node in graph.nodes if _UNIT in node.meta and is_torch_operator(node.target)
    )
