"""Searches buckets: walks over the problem with wishes that get better.

First buckets of a size each, of gathers and of reductions in turn; then boundaries between buckets are put in and taken
out: those that lie alike in equal units all at once, then those near the ends of the program one by one.

Source: local search over partitions, as in iterated list scheduling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from graphshard.planner.costs import BucketCost
from graphshard.planner.ground import Ground, Placed, Wish
from graphshard.planner.placing import placed
from graphshard.planner.problem import Gather, Problem, Reduction

# Part of a unit, or whole units, that the first wishes put into a bucket; 0: each member is alone.
_PARTS = (0.0, 0.125, 0.25, 0.5)
_UNITS = (1, 2, 3, 4, 6, 8, 12, 16)
_LEADS = (float("inf"), 4.0, 1.0)
_RESERVES = (0.0, 1.0, 2.0)
_QUEUED = (0.0, 0.5, 1.0)
# What is as fast as the fastest.
_SAME = 1.001

Ends = tuple[frozenset[int], ...]


@dataclass
class Search:
    """Walks, and what they found.

    Attributes:
        ground: of the problem.
        walks: how many are left.
    """

    ground: Ground
    walks: int

    def __post_init__(self) -> None:
        self.seen: dict[Wish, Placed | None] = {}
        self.best: Placed | None = None

    def try_(self, wish: Wish) -> bool:
        """Whether `wish` is better than all before."""
        if wish in self.seen or self.walks <= 0:
            return False
        self.walks -= 1
        found = self.seen[wish] = placed(self.ground, wish)
        if found is None or (self.best is not None and found.step_us >= self.best.step_us):
            return False
        self.best = found
        return True

    def good(self) -> list[Placed]:
        """Those that are as fast as the fastest, with the fewest collectives first."""
        if self.best is None:
            return []
        most_us = self.best.step_us * _SAME
        good = [found for found in self.seen.values() if found is not None and found.step_us <= most_us]
        return sorted(good, key=lambda found: (found.buckets, found.step_us))


def searched(problem: Problem, budget_bytes: float, walks: int = 240) -> Search:
    """What `walks` walks find."""
    search = Search(Ground(problem, budget_bytes), walks)
    _sizes(search)
    _boundaries(search)
    return search


# -- sizes


def _sizes(search: Search) -> None:
    ground, problem = search.ground, search.ground.problem
    gathers = [_ends(problem.gathers, ground.gathers, size) for size in (*_PARTS, *_UNITS)]
    reductions = [_ends(problem.reductions, ground.reductions, size) for size in (*_PARTS, *_UNITS)]
    for a, b in zip(gathers, reductions, strict=True):
        search.try_(Wish(a, b))
        search.try_(Wish(a, b, reserve_bytes=_reserve(ground, b), lead=1.0))
    if search.best is None:
        return
    for _ in range(2):
        before = search.best
        for ends in gathers:
            search.try_(replace(search.best.wish, gathers=ends))
        for ends in reductions:
            search.try_(replace(search.best.wish, reductions=ends))
        _habits(search)
        if search.best is before:
            break


def _habits(search: Search) -> None:
    assert search.best is not None
    for factor in _RESERVES:
        reserve = int(factor * _reserve(search.ground, search.best.wish.reductions))
        search.try_(replace(search.best.wish, reserve_bytes=reserve))
    for lead in _LEADS:
        search.try_(replace(search.best.wish, lead=lead))
    for queued in _QUEUED:
        search.try_(replace(search.best.wish, queued=queued))


def _reserve(ground: Ground, ends: Ends) -> int:
    """Of the largest reduction."""
    costs: list[BucketCost] = []
    for number, places in enumerate(ends):
        first = 0
        for last in sorted(places):
            costs.append(ground.reduction(number, first, last))
            first = last
    return max((cost.held + cost.freed for cost in costs), default=0)


def _ends(items: Sequence[Gather] | Sequence[Reduction], sequences: list[list[int]], size: float) -> Ends:
    """Where buckets of `size` units end; those of parts of a unit end with the unit, too."""
    unit_bytes: dict[str, int] = {}
    for item in items:
        unit_bytes[item.unit] = unit_bytes.get(item.unit, 0) + item.wire_bytes
    median = sorted(unit_bytes.values())[len(unit_bytes) // 2] if unit_bytes else 0
    found = []
    for sequence in sequences:
        ends, filled, units = {len(sequence)}, 0, 0
        for place, (i, after) in enumerate(pairwise(sequence), start=1):
            filled += items[i].wire_bytes
            new_unit = items[i].unit != items[after].unit
            units += new_unit
            full = units >= size and new_unit if size >= 1 else filled + items[after].wire_bytes > size * median
            if full or (size < 1 and new_unit):
                ends.add(place)
                filled = units = 0
        found.append(frozenset(ends))
    return tuple(found)


# -- boundaries


def _boundaries(search: Search) -> None:
    if search.best is None:
        return
    moves = list(_moves(search.ground))
    improved = True
    while improved and search.walks > 0:
        improved = False
        for gathers, number, places in moves:
            for toggled in _toggled(search.best.wish, gathers, number, places):
                improved |= search.try_(toggled)
        before = search.best
        _habits(search)
        improved |= search.best is not before


def _toggled(wish: Wish, gathers: bool, number: int, places: frozenset[int]) -> Iterator[Wish]:
    ends = wish.gathers if gathers else wish.reductions
    for changed in (ends[number] | places, ends[number] - places):
        if changed != ends[number]:
            new = (*ends[:number], changed, *ends[number + 1 :])
            yield replace(wish, gathers=new) if gathers else replace(wish, reductions=new)


def _moves(ground: Ground) -> Iterator[tuple[bool, int, frozenset[int]]]:
    """(gathers, sequence, boundaries): those that lie alike in equal units, then single ones from both ends."""
    problem = ground.problem
    single: list[tuple[int, bool, int, frozenset[int]]] = []
    for gathers, sequences in ((True, ground.gathers), (False, ground.reductions)):
        items: Sequence[Gather] | Sequence[Reduction] = problem.gathers if gathers else problem.reductions
        for number, sequence in enumerate(sequences):
            for places in _alike(items, sequence):
                if len(places) > 1:
                    yield gathers, number, places
            for place in range(1, len(sequence)):
                single.append((min(place, len(sequence) - place), gathers, number, frozenset((place,))))
    for _, gathers, number, places in sorted(single, key=lambda move: move[0]):
        yield gathers, number, places


def _alike(items: Sequence[Gather] | Sequence[Reduction], sequence: Sequence[int]) -> list[frozenset[int]]:
    """Boundaries inside a sequence, by what lies in front of them in the unit."""
    found: dict[tuple[int, ...], set[int]] = {}
    before: tuple[int, ...] = ()
    for place, i in enumerate(sequence):
        if place and items[sequence[place - 1]].unit != items[i].unit:
            before = ()
        if place:
            found.setdefault((*before, items[i].wire_bytes), set()).add(place)
        before = (*before, items[i].wire_bytes)
    return [frozenset(places) for places in found.values()]
