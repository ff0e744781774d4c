"""What occurs several times in a sequence, at any distance: parts of blocks that are not equal as a whole, as those of
an encoder and a decoder, or of the levels of a U-Net.

Source: outlining of instructions that occur again, which compilers find by suffix trees; what is worth it here is long,
so that windows of the least length find it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from itertools import pairwise
from typing import NamedTuple


class Recurrence(NamedTuple):
    """The same `length` items from each of `firsts` on, in order of their places."""

    length: int
    firsts: list[int]


def recurrences(
    items: Sequence[Hashable],
    spans: Sequence[range],
    least: int,
    fits: Set[int],
    agreeing: Callable[[int, int, int], int],
) -> Iterator[Recurrence]:
    """Those of at least `least` items, each by itself, nearly the longest first; their places do not overlap.

    Args:
        items: what may be equal.
        spans: where to look; no place goes beyond its span.
        least: items.
        fits: where one may begin, and behind which one may end.
        agreeing: takes two places and a length, of which items are equal; how many of them are so in all else.
    """
    number: dict[Hashable, int] = {}
    numbers = [number.setdefault(item, len(number)) for item in items]
    end = {place: span.stop for span in spans for place in span}
    windows: dict[tuple[int, ...], list[int]] = {}
    for place in sorted(end):
        if place + least <= end[place]:
            windows.setdefault(tuple(numbers[place : place + least]), []).append(place)
    for a, b, most in sorted(_pairs(numbers, end, windows, least), key=lambda pair: (-pair[2], pair[:2])):
        for first in range(a, a + most - least + 1):
            other = first - a + b
            if length := _agreed(first, other, most - (first - a), least, fits, agreeing):
                firsts = [first, other]
                for more in windows[tuple(numbers[first : first + least])]:
                    if (
                        more + length <= end[more]
                        and {more, more + length} <= fits
                        and numbers[more : more + length] == numbers[first : first + length]
                        and all(abs(more - known) >= length for known in firsts)
                        and agreeing(first, more, length) == length
                    ):
                        firsts.append(more)
                yield Recurrence(length, sorted(firsts))
                break


def _agreed(a: int, b: int, length: int, least: int, fits: Set[int], agreeing: Callable[[int, int, int], int]) -> int:
    """How many items from `a` and `b` on are equal in all, and end where they may; 0: fewer than `least`."""
    if not {a, b} <= fits:
        return 0
    while length >= least:
        agreed = agreeing(a, b, length)
        stop = next((i for i in range(agreed, least - 1, -1) if {a + i, b + i} <= fits), 0)
        if stop == length:
            return stop
        length = stop
    return 0


def _pairs(
    numbers: Sequence[int], end: dict[int, int], windows: dict[tuple[int, ...], list[int]], least: int
) -> Iterator[tuple[int, int, int]]:
    """(place, another one, length) of equal numbers that cannot be longer."""
    for places in windows.values():
        for a, b in pairwise(places):
            before = end.get(a - 1) == end[a] and end.get(b - 1) == end[b] and numbers[a - 1] == numbers[b - 1]
            most = min(end[a] - a, end[b] - b, b - a)
            if not before and most >= least:
                yield a, b, next((i for i in range(least, most) if numbers[a + i] != numbers[b + i]), most)
