"""A lowered graph cut in two where it first waits: launches now, the rest when its results are wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from graphshard.compat.dynamo import boxed_graph
from graphshard.graph.ir import WAIT

# Takes its arguments as one list, which it empties.
Half = Callable[[list[Any]], Any]


def cut_at_wait(gm: GraphModule) -> tuple[Half, Half]:
    """The two halves: what the first returns, as a list, is what the second takes. Without a wait all is in the first.

    Source: generated code runs a node in a fraction of the time that `torch.fx.Interpreter` takes.
    """
    nodes = list(gm.graph.nodes)
    at = next((i for i, node in enumerate(nodes) if node.target is WAIT), len(nodes) - 1)
    behind = set(nodes[at:])
    crossing = [node for node in nodes[:at] if not behind.isdisjoint(node.users)]
    first, second = Graph(), Graph()
    copies: dict[Node, Node] = {}
    for node in nodes[:at]:
        copies[node] = first.node_copy(node, copies.__getitem__)
    first.output([copies[node] for node in crossing])
    copies = {node: second.placeholder(node.name) for node in crossing}
    for node in nodes[at:-1]:
        copies[node] = second.node_copy(node, copies.__getitem__)
    second.output(map_arg(nodes[-1].args[0], copies.__getitem__))
    return boxed_graph(GraphModule(gm, first)), boxed_graph(GraphModule(gm, second))
