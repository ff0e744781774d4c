"""Hands what each block's forward saves to its backward, so that the partitioner parts a joint graph between calls.

Needs: a joint graph from a graph that went through `collapse_blocks`, whose bodies have been parted. Leaves: calls that
say which values they save and restore.

    %c = block([%x, %w], "body#0")                    %c = block_saving([%x, %w], "body#0")
    %h = getitem(%c, 0)                        ->     %h = getitem(%c, 0);  %s = getitem(%c, 1)
    %g = block_backward([%t], "body#0")               %g = block_backward([%x, %s, %t], "body#0")
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from graphshard.compat.partitioner import tag_saved
from graphshard.compat.tensors import no_fake_mode
from graphshard.graph.block_calls import BLOCK, BLOCK_BACKWARD, BLOCK_SAVING, body_of
from graphshard.graph.fake_values import FakeValues
from graphshard.graph.ir import PassContext, is_call, output_args


@dataclass(frozen=True)
class SplitEdit:
    """Names of the calls, in graph order."""

    calls: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.calls)


def decide(graph: Graph, ctx: PassContext) -> SplitEdit:
    """Every call."""
    return SplitEdit(tuple(n.name for n in graph.nodes if is_call(n, BLOCK) or is_call(n, BLOCK_BACKWARD)))


def apply(graph: Graph, edit: SplitEdit) -> None:
    """Adds results and arguments."""
    by_name = {node.name: node for node in graph.nodes}
    saved: dict[str, list[Node]] = {}
    for name in edit.calls:
        node = by_name[name]
        arguments: Any
        call: Any
        arguments, call = node.args
        if is_call(node, BLOCK):
            given = [*arguments, *_saving(graph, node, arguments, call)]
            saved[call] = [given[place] for place in body_of(call).saved]
        else:
            node.args = ([*saved[call], *arguments], call)


def _saving(graph: Graph, node: Node, arguments: Sequence[Node], call: str) -> list[Node]:
    """Puts a call that returns what it saves in the place of one that does not; returns its results."""
    forward, values = body_of(call).forward, FakeValues()
    placeholders, results = forward.graph.find_nodes(op="placeholder"), output_args(forward.graph)
    items = {user.args[1]: user for user in node.users}
    for inner, argument in zip(placeholders, arguments, strict=True):
        values.bind(inner.meta["val"], argument.meta["val"])
    given = [*node.meta["val"]]
    for inner, value in zip(results, given, strict=False):
        if inner not in placeholders:
            values.bind(inner.meta["val"], value)
    with no_fake_mode():
        given += [values.copied(inner.meta["val"]) for inner in results[len(given) :]]
    with graph.inserting_before(node):
        saving = graph.call_function(BLOCK_SAVING, (list(arguments), call))
        saving.meta = {**node.meta, "val": given}
    found = []
    for place, (inner, value) in enumerate(zip(results, given, strict=True)):
        item = items.get(place)
        if inner in placeholders:  # passed on
            found.append(arguments[placeholders.index(inner)])
            if item is not None:
                item.replace_all_uses_with(found[-1])
                graph.erase_node(item)
            continue
        if item is None:
            with graph.inserting_before(node):
                item = graph.call_function(operator.getitem, (saving, place))
                item.meta["val"] = value
        else:
            item.args = (saving, place)
        tag_saved(item)  # a block draws random numbers, and gathers
        found.append(item)
    graph.erase_node(node)
    return found
