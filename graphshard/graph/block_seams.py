"""Where in a block its stretches begin: where one block ends and the next begins, and between, where little is read
across.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor
from torch.fx import Node

from graphshard.graph.ir import is_call
from graphshard.graph.repeats import Repeat

# A block is cut into so many stretches of about the same time.
_STRETCHES = 2
# So many elements are read or written in the time of a multiplication by each of a row of this length.
_ROW = 64


def seams_of(nodes: Sequence[Node], repeat: Repeat, begins: Mapping[Node, Node], is_backward: bool) -> list[int]:
    """Places in a block: where one ends, which is in front of where a unit begins, if there is one; and evenly in time;
    each where little is read across. `begins`: the first read of each unit, and the read in front of it.
    """
    block = range(repeat.first + repeat.period, repeat.first + 2 * repeat.period)  # one with equal neighbours
    crossing = _crossing(nodes, block)
    places = [place for place in range(repeat.period) if not takes_apart(nodes[block.start + place])]
    units = [place for place in places if nodes[block.start + place] in begins]
    first = min(units or places, key=lambda place: (crossing[place], place))
    if units:
        between = _since(nodes, block.start + first, begins[nodes[block.start + first]], repeat.period)
        # Of places that are as good: forward, a block begins with what it reads, backward with gradients of that.
        back = {(first - back) % repeat.period: -back if is_backward else back for back in range(between)}
        first = min(back.keys() & set(places), key=lambda place: (crossing[place], back[place]))
    return with_inner(nodes, block, first)


def with_inner(nodes: Sequence[Node], block: range, first: int, stretches: int = _STRETCHES) -> list[int]:
    """The seams of a block one of which is at `first`: the others evenly in time, where little is read across."""
    elapsed = [0.0, *accumulate(_time(nodes[place]) for place in block)]
    crossing, chosen = _crossing(nodes, block), [first]
    total, grain = elapsed[-1], elapsed[-1] / stretches
    places = [place for place in range(len(block)) if not takes_apart(nodes[block.start + place])]
    for number in range(1, stretches):
        wanted = (elapsed[first] + number * grain) % (total or 1.0)
        near = [place for place in places if abs(elapsed[place] - wanted) <= grain / 3]
        if near:
            chosen.append(min(near, key=lambda place: (crossing[place], abs(elapsed[place] - wanted))))
    return sorted(set(chosen))


def takes_apart(node: Node) -> bool:
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
    if is_kernel(node):
        row = max((size[-1] for size in sizes if size), default=1)
        return elements + max(map(math.prod, sizes), default=0) * row / _ROW
    return elements


def is_kernel(node: Node) -> bool:
    """Whether it multiplies by more than elements."""
    return any(name in str(node.target) for name in ("mm", "attention", "convolution"))


def _size(size: Any) -> int:
    return size if isinstance(size, int) else int(getattr(size.node, "hint", None) or _ROW)


def _crossing(nodes: Sequence[Node], block: range) -> list[int]:
    """For each place of a block, elements that are computed in front of it, and only read behind it by what is near."""
    number = {node: place for place, node in enumerate(nodes)}
    found = [0] * len(block)
    for place in range(max(block.start - len(block), 0), block.stop):
        uses = [number[user] for user in nodes[place].users if user in number]
        if uses:
            elements = num_elements(nodes[place])
            for across in range(max(place + 1, block.start), min(max(uses) + 1, block.stop)):
                found[across - block.start] += elements
    return found


def num_elements(node: Node) -> int:
    """Of its result; symbolic sizes count as they were traced."""
    value = node.meta.get("val")
    return math.prod(map(_size, value.shape)) if isinstance(value, Tensor) else 0
