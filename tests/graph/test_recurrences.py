"""What recurs at any distance is found, in its spans, once in each place."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from graphshard.graph.recurrences import Recurrence, recurrences

Items = list[int]
SMALL = st.lists(st.integers(0, 2), max_size=30)


def everywhere(items: Items, least: int) -> list[Recurrence]:
    end = len(items)
    return [*recurrences(items, [range(end)], least, {*range(end + 1)}, lambda a, b, length: length)]


@given(st.lists(st.integers(0, 9), min_size=6, max_size=12, unique=True), st.integers(2, 4))
def test_all_places_of_what_recurs_between_others_are_found(part: Items, count: int) -> None:
    items = [one for i in range(count) for one in (*range(20 + 9 * i, 20 + 9 * i + i + 1), *part)]
    places = [i for i in range(len(items)) if items[i : i + len(part)] == part]
    assert everywhere(items, 6)[0] == Recurrence(len(part), places)


@given(st.lists(SMALL, min_size=1, max_size=4), st.integers(2, 5), st.sets(st.integers(0, 99)))
def test_what_is_found_is_equal_apart_and_in_its_span(parts: list[Items], least: int, fits: set[int]) -> None:
    items = [one for part in parts for one in part]
    ends = [sum(map(len, parts[:i])) for i in range(len(parts) + 1)]
    spans = [range(a, b) for a, b in pairwise(ends)]
    for length, firsts in recurrences(items, spans, least, fits, lambda a, b, length: length):
        assert length >= least and len(firsts) > 1
        assert len({tuple(items[first : first + length]) for first in firsts}) == 1
        assert all(b - a >= length for a, b in pairwise(firsts))
        assert all(any(first in span and first + length <= span.stop for span in spans) for first in firsts)
        assert all({first, first + length} <= fits for first in firsts)


def test_only_what_agrees_recurs() -> None:
    items = [*"abcdefgh", "-", *"abcdefgh", "+", *"abcdefgh"]

    def agreeing(a: int, b: int, length: int) -> int:
        return 0 if b == 18 else min(length, max(5 - a, 0))

    assert next(recurrences(items, [range(26)], 3, {*range(27)}, agreeing)) == Recurrence(5, [0, 9])
