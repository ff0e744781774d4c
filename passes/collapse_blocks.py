"""Puts one call in the place of each of a run of equal blocks, so that what they compute is traced once.

Needs: a graph as Dynamo captured it. Leaves: calls of bodies that a later step traces; `expand_blocks` puts their nodes
back into what is made of the graph.

    %u = linear(%x, %w);  %h = relu(%u)    ->    %c = call_block("body#0", %x, %w);  %h = %c[0]

Source: outlining, the inverse of inlining.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass

from torch.fx import Graph, Node

from graphshard.graph.block_calls import call_block
from graphshard.graph.equal_blocks import Block, find_blocks
from graphshard.graph.ir import PassContext

_numbers = itertools.count()


@dataclass(frozen=True)
class CollapseEdit:
    """Equal blocks by the name of the body that they get; why others stay, where it is known."""

    bodies: tuple[tuple[str, tuple[Block, ...]], ...]
    left: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.bodies)

    def __str__(self) -> str:
        runs = (f"{name}: {len(blocks)} blocks of {len(blocks[0].nodes)} nodes" for name, blocks in self.bodies)
        return f"CollapseEdit({'; '.join(runs)})"


def decide(graph: Graph, ctx: PassContext) -> CollapseEdit:
    """Finds equal blocks."""
    taken: list[tuple[Block, ...]] = []
    left: dict[str, None] = {}
    for blocks in find_blocks(graph, ctx.params):
        if blocks[0].lost:
            left["they read or yield sizes that none of their inputs has (dynamic shapes)"] = None
        elif any(block.passes_what_is_written() for block in blocks):
            left["what they read is written in place elsewhere"] = None
        elif any(block.is_lazy() for block in blocks):
            left["what goes in or out is conjugated or negated lazily"] = None
        else:
            taken.append(tuple(blocks))
    return CollapseEdit(tuple((f"body{next(_numbers)}", blocks) for blocks in taken), tuple(left))


def apply(graph: Graph, edit: CollapseEdit) -> None:
    """Replaces every block, in graph order."""
    number = {node: place for place, node in enumerate(graph.nodes)}
    calls = [(f"{name}#{i}", block) for name, blocks in edit.bodies for i, block in enumerate(blocks)]
    current: dict[Node, Node] = {}  # what stands for a node behind the blocks that were replaced
    for call, block in sorted(calls, key=lambda item: number[item[1].nodes[0]]):
        first, last = block.nodes[0], number[block.nodes[-1]]
        with graph.inserting_before(first):
            arguments = (current.get(node, node) for node in block.inputs)
            results = graph.call_function(call_block, (call, *arguments))
            for place, node in enumerate((*block.outputs, *block.passed)):
                old, item = current.get(node, node), graph.call_function(operator.getitem, (results, place))
                item.meta = dict(node.meta)
                for user in list(old.users):
                    if number.get(user, 0) > last:
                        user.replace_input_with(old, item)
                current[node] = item
        for node in reversed(block.nodes):
            graph.erase_node(node)
