"""Puts the nodes of each block in the place of the calls that stood for it while its surroundings were traced and
parted.

Needs: a forward or backward graph, or one for inference, from a graph that went through `collapse_blocks`. Leaves:
operators only.

    %h = block([%x, %w], "body#0")    ->    %u = mm(%x, %w);  %h = relu(%u)

Source: inlining, the inverse of outlining.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import takewhile
from operator import attrgetter
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from graphshard.compat.tensors import no_fake_mode, size_key
from graphshard.graph.block_calls import BLOCK, BLOCK_BACKWARD, BLOCK_SAVING, body_of
from graphshard.graph.fake_values import FakeValues
from graphshard.graph.ir import PassContext, is_call, output_args
from graphshard.graph.rewriting import Replacements


@dataclass(frozen=True)
class ExpandEdit:
    """Names of the calls, in graph order."""

    calls: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.calls)


def decide(graph: Graph, ctx: PassContext) -> ExpandEdit:
    """Every call is expanded."""
    calls = (BLOCK, BLOCK_SAVING, BLOCK_BACKWARD)
    return ExpandEdit(tuple(node.name for node in graph.nodes if any(is_call(node, call) for call in calls)))


def apply(graph: Graph, edit: ExpandEdit) -> None:
    """Copies the nodes of bodies."""
    by_name, replacements, done = {node.name: node for node in graph.nodes}, Replacements(graph), list[Node]()
    before = takewhile(lambda node: node.name != edit.calls[0], graph.nodes)
    sizes = {size_key(node.meta["val"]): node for node in before if _is_size(node)}
    for name in edit.calls:
        node = by_name[name]
        call: Any = node.args[1]
        body = body_of(call)
        part = body.backward if is_call(node, BLOCK_BACKWARD) else body.forward
        assert part is not None, call
        results = _expanded(graph, node, part, call.partition("#")[0], sizes)
        for item in node.users:
            place = item.args[1]
            assert is_call(item, operator.getitem) and isinstance(place, int), item
            replacements.put(item, results[place])
        done += (*node.users, node)
    replacements.finish()
    for node in done:
        graph.erase_node(node)
    graph.eliminate_dead_code()  # what a block computes and nobody reads


def _expanded(graph: Graph, call: Node, part: GraphModule, body: str, sizes: dict[Hashable, Node]) -> list[Node]:
    """Copies the nodes of a part of a body before its call; returns its results, but those that there are not.

    `sizes`: nodes of symbolic sizes, which all copies share.
    """
    values, copies = FakeValues(), dict[Node, Node]()
    arguments: Any = call.args[0]
    for placeholder, argument in zip(part.graph.find_nodes(op="placeholder"), arguments, strict=True):
        copies[placeholder] = argument
        values.bind(placeholder.meta["val"], argument.meta["val"])
    with graph.inserting_before(call), no_fake_mode():
        for node in part.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if _is_size(node) and (known := sizes.get(size_key(node.meta["val"]))) is not None:
                copies[node] = known
                continue
            copy = copies[node] = graph.node_copy(node, copies.__getitem__)
            if _is_size(node):
                sizes[size_key(node.meta["val"])] = copy
            if "val" in node.meta:
                copy.meta["val"] = values.copied(node.meta["val"])
            if node.op == "get_attr":
                _take_attribute(graph, copy, part, body)
    return [copies[node] for node in output_args(part.graph) if node is not None]


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def _take_attribute(graph: Graph, node: Node, part: GraphModule, body: str) -> None:
    """A constant or an inner graph of the body becomes the graph's."""
    owner: Any = graph.owning_module
    name = f"{body}_{str(node.target).replace('.', '_')}"
    if not hasattr(owner, name):
        setattr(owner, name, attrgetter(str(node.target))(part))
    node.target = name
