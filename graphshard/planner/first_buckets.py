"""Buckets that a search begins with: parts of units, units, equal bytes, and ever smaller ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from graphshard.planner.baselines import FIXED_BYTES
from graphshard.planner.candidates import BucketEnds
from graphshard.planner.problem import Tasks

# Part of a unit, or whole units, that the first candidates put into a bucket; 0: each member is alone.
_PARTS = (0.0, 0.125, 0.25, 0.5)
_UNITS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
# Parts of all bytes at which few buckets end.
_CUTS = (
    (0.5,),
    (0.4, 0.75),
    (0.5, 0.75, 0.9),
    (0.1, 0.5, 0.85),
    (0.35, 0.6, 0.8, 0.92),
    (0.05, 0.15, 0.35, 0.65, 0.9),
)


def first_ends(items: Tasks, sequences: list[list[int]]) -> list[BucketEnds]:
    """Where buckets of many kinds end, for each sequence; as many for gathers as for reductions."""
    found = [ends_of_units(items, sequences, size) for size in (*_PARTS, *_UNITS)]
    found.append(tuple(_ends_of_bytes(items, sequence, FIXED_BYTES) for sequence in sequences))
    found += [tuple(_ends_at(items, sequence, cuts) for sequence in sequences) for cuts in _CUTS]
    return found


def ends_of_units(items: Tasks, sequences: list[list[int]], size: float) -> BucketEnds:
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


def _ends_of_bytes(items: Tasks, sequence: list[int], most: int) -> frozenset[int]:
    ends, filled = {len(sequence)}, 0
    for place, i in enumerate(sequence):
        if place and filled + items[i].wire_bytes > most:
            ends.add(place)
            filled = 0
        filled += items[i].wire_bytes
    return frozenset(ends)


def _ends_at(items: Tasks, sequence: list[int], cuts: Sequence[float]) -> frozenset[int]:
    before = list(accumulate(items[i].wire_bytes for i in sequence))
    nearest = {min(range(len(before)), key=lambda place: abs(before[place] - cut * before[-1])) + 1 for cut in cuts}
    return frozenset({len(sequence), *nearest})
