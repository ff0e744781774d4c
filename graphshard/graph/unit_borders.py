"""Where the part of a graph that is one unit's ends and the next begins, and which of these parts are equal: the blocks
of a model that has several kinds of them in turns, so that no run of nodes repeats often enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from itertools import groupby, pairwise
from typing import NamedTuple

from torch.fx import Node

from graphshard.graph.repeats import Repeat


class Read(NamedTuple):
    """Where a parameter is read: by the node at `first`, in the end by that at `last`."""

    first: int
    last: int
    unit: str


def unit_borders(
    reads: Sequence[Read], crossing: Sequence[int], fits: Callable[[int], bool], items: Sequence[Hashable]
) -> list[int]:
    """The first node of each unit's part: between the last read of the unit before and the first one of its own, where
    the least goes across. Parts that do the same from their first read to the last one begin alike.

    Args:
        reads: of all parameters, in the order of `first`.
        crossing: for each place, how much is computed in front of it and read behind it.
        fits: whether a part may begin at a place.
        items: what nodes do.
    """
    parts = [[*own] for _, own in groupby(reads, key=lambda read: read.unit)]
    firsts = [*(own[0].first for own in parts), len(items)]
    lasts = [
        min(max(read.last for read in own), following - 1) for own, following in zip(parts, firsts[1:], strict=True)
    ]
    alike: dict[tuple[Hashable, ...], list[range]] = {}
    for before, first, last in zip(lasts, firsts[1:], lasts[1:], strict=False):
        if any(map(fits, gap := range(before + 1, first + 1))):
            alike.setdefault(tuple(items[first : last + 1]), []).append(gap)
    found = []
    for gaps in alike.values():
        together = _shifts(gaps, fits, _alike_in_front(items, gaps))
        for own in (gaps,) if together else ([gap] for gap in gaps):
            shifts = together or _shifts(own, fits, len(own[0]))
            # Of places that are as good, the last: a part begins with what it reads.
            shift = min(shifts, key=lambda shift: (sum(crossing[gap[-1] - shift] for gap in own), shift))
            found += [gap[-1] - shift for gap in own]
    return sorted(found)


def _shifts(gaps: Sequence[range], fits: Callable[[int], bool], most: int) -> list[int]:
    """How far in front of the end of all `gaps` a place fits."""
    return [shift for shift in range(most) if all(fits(gap[-1] - shift) for gap in gaps)]


def _alike_in_front(items: Sequence[Hashable], gaps: Sequence[range]) -> int:
    """How many places at the end of all `gaps` have the same between them and that end."""
    most = min(map(len, gaps))
    differs = (back for back in range(1, most) if len({items[gap[-1] - back] for gap in gaps}) > 1)
    return next(differs, most)


def crossings(nodes: Sequence[Node], number: Mapping[Node, int], size: Callable[[Node], int]) -> list[int]:
    """For each place, and the end, the summed `size` of what is computed in front of it and read behind it."""
    change = [0] * (len(nodes) + 2)
    for place, node in enumerate(nodes):
        last = max((number.get(user, place) for user in node.users), default=place)
        if last > place:
            amount = size(node)
            change[place + 1] += amount
            change[last + 1] -= amount
    found, total = [], 0
    for amount in change[:-1]:
        total += amount
        found.append(total)
    return found


def equal_parts(
    items: Sequence[Hashable],
    borders: Sequence[int],
    taken: Set[int],
    least_count: int,
    least_size: int,
    sizes: Sequence[int] | None = None,
) -> list[list[range]]:
    """Places of the parts of which there are so many equal ones, in groups. A part may begin as others are and go on.

    Args:
        items: what nodes do.
        borders: where parts begin, in order.
        taken: places that are no part.
        least_count: of equal parts.
        least_size: of a part.
        sizes: of the items; None: each is 1.
    """
    number: dict[Hashable, int] = {}
    numbers = [number.setdefault(item, len(number)) for item in items]
    parts = [range(begin, end) for begin, end in pairwise([*borders, len(items)])]
    keys = [tuple(numbers[part.start : part.stop]) for part in parts]
    size_of = {
        key: len(key) if sizes is None else sum(sizes[part.start : part.stop])
        for key, part in zip(keys, parts, strict=True)
    }
    kind_of = _kinds(keys, lambda key, count: count >= least_count and size_of[key] >= least_size)
    found: dict[tuple[int, ...], list[range]] = {}
    for part, key in zip(parts, keys, strict=True):
        kind = kind_of[key]
        if kind is not None and taken.isdisjoint(own := part[: len(kind)]):
            found.setdefault(kind, []).append(own)
    return [own for own in found.values() if len(own) >= least_count]


def _kinds(
    keys: Sequence[tuple[int, ...]], counts_as: Callable[[tuple[int, ...], int], bool]
) -> dict[tuple[int, ...], tuple[int, ...] | None]:
    """For each key, itself or another one that it begins as: that of which equal parts cover most, if any `counts_as`
    a kind, with the number of keys that begin so.
    """
    counts = Counter(keys)
    begins: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    total: Counter[tuple[int, ...]] = Counter()
    chain: list[tuple[int, ...]] = []
    for key in sorted(counts):  # what begins as a key comes right behind it
        while chain and key[: len(chain[-1])] != chain[-1]:
            chain.pop()
        chain.append(key)
        begins[key] = [*chain]
        for begin in chain:
            total[begin] += counts[key]
    return {
        key: max(
            (begin for begin in begins[key] if counts_as(begin, total[begin])),
            key=lambda begin: (total[begin] - 1) * len(begin),
            default=None,
        )
        for key in counts
    }


def has_equal_parts(repeat: Repeat, parts: Sequence[Sequence[range]]) -> bool:
    """Whether what repeats is parts that equal each other, as of several layers, or some elsewhere; else it is
    one block, though it may be of several units. `parts`: groups of equal ones.
    """
    first, period, end = repeat.first, repeat.period, repeat.end
    one, near = range(first + period, first + 2 * period), range(first - period, end + period)
    starts = [[part.start for part in own] for own in parts]
    within = [own for own in starts if any(start in one for start in own)]
    if not any(sum(start in one for start in own) > 1 or any(start not in near for start in own) for own in within):
        return False
    covered = sum(len(part) for own in parts for part in own if first <= part.start < end)
    return covered >= repeat.period * (repeat.count - 1)
