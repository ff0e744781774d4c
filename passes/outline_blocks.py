"""Finds equal blocks and the seams between and in them: planned launches and waits stay at seams, so that what is
computed between two seams is the same in each block and is compiled once for all.

Needs: a forward, backward or inference graph with markers. A graph that is looked at before flags are known gets its
seams then, and all of its programs have the same. Leaves: ``meta["seam"]`` on what blocks compute: whether the node
begins a stretch.

    block, block, block, block   ->   (a, b, c), (a, b, c), (a, b, c), (a, b, c)

Source: outlining, the inverse of inlining.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from graphshard.graph.ir import PassContext, is_call, is_constant, is_marker, shard_placeholder, unshards
from graphshard.graph.repeats import Repeat, find_repeats
from graphshard.graph.stretches import looks_up_seed
from graphshard.graph.unit_borders import Read, crossings, equal_parts, has_equal_parts, unit_borders

# Fewer or shorter blocks are not worth it. What repeats so seldom may be less than a block: an own part of each unit is
# not.
_LEAST_REPEATS = 4
_LEAST_BLOCKS = 3
_LEAST_NODES = 3
# A block is cut into so many stretches of about the same time.
_STRETCHES = 2
# So many elements are read or written in the time of a multiplication by each of a row of this length.
_ROW = 64


@dataclass(frozen=True)
class OutlineEdit:
    """(nodes of all blocks in order, how many are one block, places in it that begin a stretch) for each run of equal
    blocks, the last of which may be a part.
    """

    blocks: tuple[tuple[tuple[str, ...], int, tuple[int, ...]], ...]

    def __bool__(self) -> bool:
        return bool(self.blocks)

    def __str__(self) -> str:
        runs = (f"{len(names) // period} blocks from {names[0]}, seams {seams}" for names, period, seams in self.blocks)
        return f"OutlineEdit({'; '.join(runs)})"


def decide(graph: Graph, ctx: PassContext) -> OutlineEdit:
    """Looks for equal blocks in what is computed. FSDP2's order is the same in each: it needs no seams."""
    if not ctx.outlines:
        return OutlineEdit(())
    calls = [node for node in graph.nodes if node.op == "call_function" and not is_marker(node)]
    nodes = [node for node in calls if not is_constant(node)]
    if any("seam" in node.meta for node in nodes):
        return OutlineEdit(())
    kinds = [_kind(node) for node in nodes]
    number = {node: place for place, node in enumerate(nodes)}
    reads = _reads(graph, ctx, number)
    crossing = crossings(nodes, number, _elements)
    borders = unit_borders(reads, crossing, lambda place: not _takes_apart(nodes[place]), kinds)
    of_units = equal_parts(kinds, borders, set(), _LEAST_REPEATS, _LEAST_NODES)
    begins = {nodes[own.first]: nodes[before.last] for before, own in pairwise(reads) if before.unit != own.unit}
    found, taken = [], set[int]()
    for repeat in find_repeats(kinds, _LEAST_REPEATS, _LEAST_NODES):
        if has_equal_parts(repeat, of_units):
            continue
        seams = _seams(nodes, repeat, begins, ctx.direction == "backward")
        end = repeat.end
        while end < len(kinds) and kinds[end] == kinds[end - repeat.period]:
            end += 1  # a block that ends otherwise is equal so far; where the next repeat begins, that one counts
        end += (end - repeat.first) % repeat.period in seams  # where they end at a seam, what is behind begins there
        taken.update(range(repeat.first, end))
        found.append((tuple(node.name for node in nodes[repeat.first : end]), repeat.period, tuple(seams)))
    for parts in equal_parts(kinds, borders, taken, _LEAST_BLOCKS, _LEAST_NODES):
        seams = _with_inner(nodes, parts[len(parts) // 2], 0)
        for part in parts:  # what is behind one begins there
            behind = part.stop + (part.stop < len(nodes) and part.stop not in taken)
            found.append((tuple(node.name for node in nodes[part.start : behind]), len(part), tuple(seams)))
    return OutlineEdit(tuple(found))


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


def _seams(nodes: Sequence[Node], repeat: Repeat, begins: Mapping[Node, Node], is_backward: bool) -> list[int]:
    """Places in a block: where one ends, which is in front of where a unit begins, if there is one; and evenly in time;
    each where little is read across. `begins`: the first read of each unit, and the read in front of it.
    """
    block = range(repeat.first + repeat.period, repeat.first + 2 * repeat.period)  # one with equal neighbours
    crossing = _crossing(nodes, block)
    places = [place for place in range(repeat.period) if not _takes_apart(nodes[block.start + place])]
    units = [place for place in places if nodes[block.start + place] in begins]
    first = min(units or places, key=lambda place: (crossing[place], place))
    if units:
        between = _since(nodes, block.start + first, begins[nodes[block.start + first]], repeat.period)
        # Of places that are as good: forward, a block begins with what it reads, backward with gradients of that.
        back = {(first - back) % repeat.period: -back if is_backward else back for back in range(between)}
        first = min(back.keys() & set(places), key=lambda place: (crossing[place], back[place]))
    return _with_inner(nodes, block, first)


def _with_inner(nodes: Sequence[Node], block: range, first: int) -> list[int]:
    """The seams of a block one of which is at `first`: the others evenly in time, where little is read across."""
    elapsed = [0.0, *accumulate(_time(nodes[place]) for place in block)]
    crossing, chosen = _crossing(nodes, block), [first]
    total, grain = elapsed[-1], elapsed[-1] / _STRETCHES
    places = [place for place in range(len(block)) if not _takes_apart(nodes[block.start + place])]
    for number in range(1, _STRETCHES):
        wanted = (elapsed[first] + number * grain) % (total or 1.0)
        near = [place for place in places if abs(elapsed[place] - wanted) <= grain / 3]
        if near:
            chosen.append(min(near, key=lambda place: (crossing[place], abs(elapsed[place] - wanted))))
    return sorted(set(chosen))


def _takes_apart(node: Node) -> bool:
    """Whether it takes one of several results: it stays with what has them."""
    return is_call(node, operator.getitem)


def _since(nodes: Sequence[Node], place: int, before: Node, most: int) -> int:
    """How many nodes are behind `before`, up to the one at a place, which counts always."""
    return next((back for back in range(1, most) if nodes[place - back] is before), most)


def _time(node: Node) -> float:
    """A rough measure: elements that are read and written, and multiplications."""
    values = [node.meta.get("val"), *(source.meta.get("val") for source in node.all_input_nodes)]
    sizes = [[_size(size) for size in value.shape] for value in values if isinstance(value, Tensor)]
    elements = sum(math.prod(size) for size in sizes)
    if "mm" in str(node.target) or "attention" in str(node.target) or "convolution" in str(node.target):
        row = max((size[-1] for size in sizes if size), default=1)
        return elements + max(map(math.prod, sizes), default=0) * row / _ROW
    return elements


def _size(size: Any) -> int:
    return size if isinstance(size, int) else int(getattr(size.node, "hint", None) or _ROW)


def _crossing(nodes: Sequence[Node], block: range) -> list[int]:
    """For each place of a block, elements that are computed in front of it, and only read behind it by what is near."""
    number = {node: place for place, node in enumerate(nodes)}
    found = [0] * len(block)
    for place in range(max(block.start - len(block), 0), block.stop):
        uses = [number[user] for user in nodes[place].users if user in number]
        if uses:
            elements = _elements(nodes[place])
            for across in range(max(place + 1, block.start), min(max(uses) + 1, block.stop)):
                found[across - block.start] += elements
    return found


def _elements(node: Node) -> int:
    value = node.meta.get("val")
    return math.prod(map(_size, value.shape)) if isinstance(value, Tensor) else 0
