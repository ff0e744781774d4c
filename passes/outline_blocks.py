"""Finds equal blocks, what recurs elsewhere, and the seams between and in them: planned launches and waits stay at
seams, so that what is computed between two seams is the same in each block and is compiled once for all.

Needs: a forward, backward or inference graph with markers. A graph that is looked at before flags are known gets its
seams then, and all of its programs have the same. Leaves: ``meta["seam"]`` on what blocks compute: whether the node
begins a stretch.

    block, block, block, block   ->   (a, b, c), (a, b, c), (a, b, c), (a, b, c)

Source: outlining, the inverse of inlining.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from graphshard.graph.block_seams import num_elements, seams_of, takes_apart, with_inner
from graphshard.graph.ir import PassContext, is_constant, is_marker, shard_placeholder, unshards
from graphshard.graph.recurring import Outlined, recurring, with_behind
from graphshard.graph.repeats import find_repeats
from graphshard.graph.stretches import looks_up_seed
from graphshard.graph.unit_borders import Read, crossings, equal_parts, has_equal_parts, unit_borders

# Fewer or shorter blocks are not worth it. What repeats so seldom may be less than a block: an own part of each unit is
# not.
_LEAST_REPEATS = 4
_LEAST_BLOCKS = 3
_LEAST_NODES = 3


@dataclass(frozen=True)
class OutlineEdit:
    """(nodes of all blocks in order, how many are one block, places in it that begin a stretch) for each run of equal
    blocks, the last of which may be a part, and for each place of what recurs.
    """

    blocks: tuple[tuple[tuple[str, ...], int, tuple[int, ...]], ...]

    def __bool__(self) -> bool:
        return bool(self.blocks)

    def __str__(self) -> str:
        runs = (f"{len(names) // period} blocks from {names[0]}, seams {seams}" for names, period, seams in self.blocks)
        return f"OutlineEdit({'; '.join(runs)})"


def decide(graph: Graph, ctx: PassContext) -> OutlineEdit:
    """Looks for equal blocks in what is computed, then for what recurs. FSDP2's order needs no seams: it is the same in
    each block.
    """
    if not ctx.outlines:
        return OutlineEdit(())
    calls = [node for node in graph.nodes if node.op == "call_function" and not is_marker(node)]
    nodes = [node for node in calls if not is_constant(node)]
    if any("seam" in node.meta for node in nodes):
        return OutlineEdit(())
    kinds = [_kind(node) for node in nodes]
    number = {node: place for place, node in enumerate(nodes)}
    reads = _reads(graph, ctx, number)
    crossing = crossings(nodes, number, num_elements)
    borders = unit_borders(reads, crossing, lambda place: not takes_apart(nodes[place]), kinds)
    of_units = equal_parts(kinds, borders, set(), _LEAST_REPEATS, _LEAST_NODES)
    begins = {nodes[own.first]: nodes[before.last] for before, own in pairwise(reads) if before.unit != own.unit}
    found, taken = list[Outlined](), set[int]()
    for repeat in find_repeats(kinds, _LEAST_REPEATS, _LEAST_NODES):
        if has_equal_parts(repeat, of_units):
            continue
        seams = seams_of(nodes, repeat, begins, ctx.direction == "backward")
        end = repeat.end
        while end < len(kinds) and kinds[end] == kinds[end - repeat.period]:
            end += 1  # a block that ends otherwise is equal so far; where the next repeat begins, that one counts
        end += (end - repeat.first) % repeat.period in seams  # where they end at a seam, what is behind begins there
        taken.update(range(repeat.first, end))
        found.append(Outlined([range(repeat.first, end)], repeat.period, seams))
    for parts in equal_parts(kinds, borders, taken, _LEAST_BLOCKS, _LEAST_NODES):
        found.append(
            Outlined(with_behind(parts, len(nodes), taken), len(parts[0]), with_inner(nodes, parts[len(parts) // 2], 0))
        )
    found += recurring(nodes, kinds, borders, found)
    return OutlineEdit(
        tuple(
            (tuple(node.name for node in nodes[part.start : part.stop]), blocks.period, tuple(blocks.seams))
            for blocks in found
            for part in blocks.places
        )
    )


def apply(graph: Graph, edit: OutlineEdit) -> None:
    """Writes the seams on the nodes."""
    by_name = {node.name: node for node in graph.nodes}
    for names, period, seams in edit.blocks:
        for place, name in enumerate(names):
            by_name[name].meta["seam"] = place % period in seams


def _kind(node: Node) -> Hashable:
    """What a node does, whatever its arguments are called."""
    args = node.args[:1] if looks_up_seed(node) else node.args
    return str((node.target, map_arg((args, node.kwargs), _shape)))


def _shape(node: Node) -> Any:
    value = node.meta.get("val")
    return f"{value.dtype}{tuple(value.shape)}{value.stride()}" if isinstance(value, Tensor) else type(value).__name__


def _reads(graph: Graph, ctx: PassContext, number: Mapping[Node, int]) -> list[Read]:
    """Where gathered parameters are read."""
    return sorted(
        Read(number[node], number[node], ctx.params[shard_placeholder(gathered).name].unit)
        for gathered in unshards(graph)
        for node in filter(number.__contains__, gathered.users)
    )
