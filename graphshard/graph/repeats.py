"""Finds stretches of a sequence that repeat one behind the other, as equal blocks do.

Source: tandem repeats of strings; here only their longest runs matter, so periods are guessed from distances between
equal items.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

# So many periods are tried, those that most pairs of equal items have.
_PERIODS = 32


@dataclass(frozen=True)
class Repeat:
    """Items `first` to `first + period * count` are `count` times the same `period` items."""

    first: int
    period: int
    count: int

    @property
    def end(self) -> int:
        """Behind the last item."""
        return self.first + self.period * self.count


def find_repeats(items: Sequence[Hashable], least_count: int, least_period: int) -> list[Repeat]:
    """Repeats that do not overlap, in order: the longest, then those in front of it and behind it."""
    return list(_repeats(items, 0, len(items), least_count, least_period))


def _repeats(items: Sequence[Hashable], begin: int, end: int, least_count: int, least_period: int) -> Iterator[Repeat]:
    if end - begin < least_count * least_period:
        return
    best: Repeat | None = None
    for period in _likely_periods(items, begin, end, least_period):
        for found in _runs(items, begin, end, period):
            # Of periods that cover as much, the shortest: a multiple of it repeats as well.
            if found.count >= least_count and (
                best is None or (found.end - found.first, -period) > (best.end - best.first, -best.period)
            ):
                best = found
    if best is not None:
        yield from _repeats(items, begin, best.first, least_count, least_period)
        yield best
        yield from _repeats(items, best.end, end, least_count, least_period)


def _likely_periods(items: Sequence[Hashable], begin: int, end: int, least: int) -> list[int]:
    seen: dict[Hashable, int] = {}
    distances: Counter[int] = Counter()
    counts = Counter(items[begin:end])
    for place in range(begin, end):
        item = items[place]
        if item in seen:
            distances[place - seen[item]] += 1
        seen[item] = place
    # What is in a block several times has shorter distances: sums of them are guessed, too.
    rare = min((count for count in counts.values() if count > 1), default=0)
    marks = [place for place in range(begin, end) if counts[items[place]] == rare]
    distances.update(b - a for a, b in pairwise(marks) if items[a] == items[b])
    return [period for period, _ in distances.most_common() if period >= least][:_PERIODS]


def _runs(items: Sequence[Hashable], begin: int, end: int, period: int) -> Iterator[Repeat]:
    first = begin
    for place in range(begin, end - period + 1):
        if place == end - period or items[place] != items[place + period]:
            if place > first:
                yield Repeat(first, period, (place - first) // period + 1)
            first = place + 1
