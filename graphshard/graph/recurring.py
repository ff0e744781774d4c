"""Equal blocks of a program, and what of them, or between them, recurs elsewhere: parts of an encoder's blocks in a
decoder's, two blocks that are equal but for their ends.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from torch.fx import Node

from graphshard.graph.block_seams import is_kernel, takes_apart, with_inner
from graphshard.graph.ir import declares_view
from graphshard.graph.recurrences import Recurrence, recurrences

# What recurs is at least so long, and saves so many nodes for each call that it takes.
_LEAST = 40
_WORTH = 8
# Its stretches are at most so long.
_MOST = 50


@dataclass(frozen=True)
class Outlined:
    """Equal blocks: in each of `places` one of `period` nodes begins behind the other, and has stretches from `seams`
    on; what is left at the end of a place begins as a block does.
    """

    places: list[range]
    period: int
    seams: list[int]

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return sum(len(part) // self.period for part in self.places)

    def one(self) -> range:
        """One of them, from a seam to a seam."""
        first = self.places[0].start + self.seams[0]
        return range(first, first + self.period)

    def seams_from(self, first: int, length: int) -> set[int]:
        """Those in `length` nodes from `first` on, in the first of `places`, counted from there."""
        places = ((self.places[0].start + seam - first) % self.period for seam in self.seams)
        return {place for place in places if place < length}

    def add_seams(self, first: int, seams: Iterable[int]) -> None:
        """Those counted from `first` on, in the first of `places`."""
        more = {(first + seam - self.places[0].start) % self.period for seam in seams}
        self.seams[:] = sorted(more.union(self.seams))


@dataclass(frozen=True)
class _Span:
    """Where something may recur.

    Attributes:
        places: of nodes.
        of: blocks that have what is there, and from where on in the first of their places.
    """

    places: range
    of: tuple[tuple[Outlined, int], ...] = ()

    def part(self, first: int, stop: int) -> _Span:
        """What is there from one place to another."""
        return _Span(range(first, stop), tuple((blocks, at + first - self.places.start) for blocks, at in self.of))

    def without(self, firsts: Sequence[int], length: int) -> Iterable[_Span]:
        """What is left without so many places from each of `firsts` on."""
        inside = (first for first in firsts if first in self.places)
        edges = [self.places.start, *(edge for first in inside for edge in (first, first + length)), self.places.stop]
        return (self.part(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b)


def with_behind(parts: Sequence[range], end: int, taken: Set[int]) -> list[range]:
    """`parts` with the node behind each, which begins a stretch, too, unless it is `taken`; there are `end` nodes."""
    return [range(own.start, own.stop + (own.stop < end and own.stop not in taken)) for own in parts]


def recurring(
    nodes: Sequence[Node], kinds: Sequence[Hashable], borders: Sequence[int], found: Sequence[Outlined]
) -> list[Outlined]:
    """What recurs outside of blocks that were found, there or in one of these, which get its seams.

    Args:
        nodes: all that is computed.
        kinds: what each does.
        borders: where units begin, which are seams of what recurs: between two seams nothing is launched, so what is
            read there is gathered together.
        found: equal blocks.
    """
    taken = {place for blocks in found for part in blocks.places for place in part}
    free = pairwise([-1, *sorted(taken), len(nodes)])
    spans = [_Span(range(a + 1, b)) for a, b in free if b > a + 1]
    spans += [_Span(blocks.one(), ((blocks, blocks.one().start),)) for blocks in found]
    beside = {place for span in spans for place in _beside_kernels(nodes, span.places)}
    agreeing = partial(_agreeing, nodes, {node: place for place, node in enumerate(nodes)})
    more = list[Outlined]()
    while True:
        places = [span.places for span in spans]
        fits = beside.union(place for own in places for place in (own.start, own.stop))
        candidates = recurrences(kinds, places, _LEAST, fits, agreeing)
        if (best := next((one for one in candidates if _saves(one, spans)), None)) is None:
            return more
        length, firsts = best
        where = _where(best, spans)
        within = [own for span in where for own in span.of]
        seams = {0}.union(*(blocks.seams_from(at, length) for blocks, at in within))
        outside = [span.places for span in where if not span.of]
        seams.update(at - own.start for own in outside for at in borders if at in own)
        if not within:
            for a, b in pairwise([*sorted(seams), length]):
                part = range(outside[0].start + a, outside[0].start + b)
                seams.update(a + seam for seam in with_inner(nodes, part, 0, -(-len(part) // _MOST)))
        for blocks, at in within:
            blocks.add_seams(at, [*seams, length])
        if outside:
            more.append(Outlined(with_behind(outside, len(nodes), taken), length, sorted(seams)))
            within.append((more[-1], outside[0].start))
        # Parts of it may recur elsewhere: they are looked for in one of its places.
        spans = [part for span in spans for part in span.without(firsts, length)]
        spans.append(_Span(where[0].places, tuple(within)))


def _where(recurrence: Recurrence, spans: Sequence[_Span]) -> list[_Span]:
    length, firsts = recurrence
    return [next(span.part(at, at + length) for span in spans if at in span.places) for at in firsts]


def _saves(recurrence: Recurrence, spans: Sequence[_Span]) -> bool:
    """Whether what is compiled once is worth the calls of it in a step."""
    calls = sum(sum(blocks.count for blocks, _ in span.of) or 1 for span in _where(recurrence, spans))
    return recurrence.length * (len(recurrence.firsts) - 1) >= _WORTH * calls


def _beside_kernels(nodes: Sequence[Node], span: range) -> Iterator[int]:
    """Places at which a stretch may begin for nothing: what is in front of one, or begins there, is fused with nothing
    anyway.
    """
    for step in (1, -1):
        beside = False
        for place in span[::step]:
            node = nodes[place]
            if beside and step == 1 and not takes_apart(node):
                yield place
            if not declares_view(node.target) and not (step == 1 and takes_apart(node)):
                beside = is_kernel(node)
            if beside and step == -1 and not takes_apart(node):
                yield place


def _agreeing(nodes: Sequence[Node], number: Mapping[Node, int], a: int, b: int, length: int) -> int:
    """How many nodes from `a` and `b` on read, of those, the same, and are read by others where the others are."""

    def inside(others: Iterable[Node], first: int) -> list[int]:
        return [at - first for node in others if first <= (at := number.get(node, -1)) < first + length]

    for i in range(length):
        one, other = nodes[a + i], nodes[b + i]
        if inside(one.all_input_nodes, a) != inside(other.all_input_nodes, b):
            return i
        if (len(inside(one.users, a)) < len(one.users)) != (len(inside(other.users, b)) < len(other.users)):
            return i
    return length
