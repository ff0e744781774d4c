"""Splits a backward graph in two: gradients of inputs now, gradients of parameters later.

    %dx = mm(%dy, %w);  %dw = mm(%dyt, %x);  %r = reduce_grad(%dw, %s);  return %dx, %r
    ->  inputs:   %dx = mm(%dy, %w);  return %dx, None, %dyt
        weights:  placeholders %x, %s, %dyt;  %dw = mm(%dyt, %x);  %r = reduce_grad(%dw, %s);  return %r

What both halves need is computed in the first and handed over, except for gathered parameters: they are gathered again.
Source: the split of Qi et al., Zero Bubble Pipeline Parallelism, 2023.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, GraphModule, Node

from graphshard.compat.inductor import module_of
from graphshard.graph.ir import output_args, output_node, reductions, unshards


@dataclass(frozen=True)
class Halves:
    """The two graphs.

    Attributes:
        inputs: takes the arguments of the whole; its results are those of the whole, None for parameters, then what it
            hands over.
        weights: takes `taken`, then what is handed over.
        taken: positions of arguments of the whole.
        positions: of the results of `weights` among those of the whole.
    """

    inputs: GraphModule
    weights: GraphModule
    taken: tuple[int, ...]
    positions: tuple[int, ...]


def split_backward(gm: GraphModule) -> Halves:
    """Splits a backward graph with markers."""
    graph = gm.graph
    results, reduced, gathered = output_args(graph), set(reductions(graph)), set(unshards(graph))
    positions = tuple(i for i, result in enumerate(results) if result in reduced)
    own = [result for i, result in enumerate(results) if i not in positions and isinstance(result, Node)]
    first = _ancestors(own)
    second: dict[Node, None] = {}  # what only the second half computes
    boundary: dict[Node, None] = {}
    todo = [results[i] for i in positions]
    while todo:
        node = todo.pop()
        if node in second or node in boundary:
            continue
        if node in first and node.op != "placeholder" and node not in gathered:
            boundary[node] = None
        else:
            second[node] = None
            todo += node.all_input_nodes
    handed = [node for node in graph.nodes if node in boundary]
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    taken = tuple(i for i, node in enumerate(placeholders) if node in second)

    now = Graph(owning_module=gm)
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        if node in first or node.op == "placeholder":
            copies[node] = now.node_copy(node, copies.__getitem__)
    kept = [None if i in positions or not isinstance(r, Node) else copies[r] for i, r in enumerate(results)]
    _finish(now, (*kept, *(copies[node] for node in handed)), graph)

    later = Graph(owning_module=gm)
    copies = {}
    for i in taken:
        copies[placeholders[i]] = later.node_copy(placeholders[i], copies.__getitem__)
    for node in handed:
        copies[node] = later.placeholder(f"handed_{node.name}")
        copies[node].meta["val"] = node.meta["val"]
    for node in graph.nodes:
        if node in second and node.op != "placeholder":
            copies[node] = later.node_copy(node, copies.__getitem__)
    _finish(later, tuple(copies[results[i]] for i in positions), graph)
    return Halves(module_of(gm, now), module_of(gm, later), taken, positions)


def _ancestors(nodes: list[Node]) -> set[Node]:
    found: set[Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


def _finish(graph: Graph, results: tuple[Node | None, ...], whole: Graph) -> None:
    graph.output(results).meta = dict(output_node(whole).meta)
