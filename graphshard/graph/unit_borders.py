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


def unit_borders(reads: Sequence[Read], crossing: Sequence[int], fits: Callable[[int], bool]) -> list[int]:
    """The first node of each unit's part: between the last read of the unit before and the first one of its own, where
    the least goes across.

    Args:
        reads: of all parameters, in the order of `first`.
        crossing: for each place, how much is computed in front of it and read behind it.
        fits: whether a part may begin at a place.
    """
    parts = [[*own] for _, own in groupby(reads, key=lambda read: read.unit)]
    found = []
    for own, following in pairwise(parts):
        end = following[0].first
        begin = min(max(read.last for read in own), end - 1) + 1
        if places := [place for place in range(begin, end + 1) if fits(place)]:
            # Of places that are as good, the last: a part begins with what it reads.
            found.append(min(places, key=lambda place: (crossing[place], -place)))
    return found


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
    parts = [range(begin, end) for begin, end in pairwise([*borders, len(items)])]
    keys = [tuple(items[place] for place in part) for part in parts]
    long = (sum(sizes[part.start : part.stop]) if sizes is not None else len(part) for part in parts)
    counts = Counter(key for key, size in zip(keys, long, strict=True) if size >= least_size)
    found: dict[tuple[Hashable, ...], list[range]] = {key: [] for key, _ in counts.most_common()}
    for part, key in zip(parts, keys, strict=True):
        kind = key if counts[key] >= least_count else next((own for own in found if key[: len(own)] == own), None)
        if kind is not None and taken.isdisjoint(own := part[: len(kind)]):
            found[kind].append(own)
    return [own for own in found.values() if len(own) >= least_count]


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
