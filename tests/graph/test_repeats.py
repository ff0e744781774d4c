"""Repeats in a sequence are found: planted ones, and none where there are none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from graphshard.graph.repeats import Repeat, find_repeats


@given(
    st.lists(st.integers(0, 9), min_size=4, max_size=12),
    st.integers(4, 9),
    st.lists(st.integers(20, 29), max_size=8),
    st.lists(st.integers(30, 39), max_size=8),
)
def test_equal_blocks_are_found_between_others(block: list[int], count: int, head: list[int], tail: list[int]) -> None:
    items = [*head, *block * count, *tail]
    found = max(find_repeats(items, 4, 1), key=lambda repeat: repeat.end - repeat.first)
    assert (found.first, found.end) == (len(head), len(head) + len(block) * count)
    assert len(block) % found.period == 0


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(2, 4), st.integers(1, 5))
def test_what_is_found_repeats_and_does_not_overlap(items: list[int], count: int, period: int) -> None:
    end = 0
    for found in find_repeats(items, count, period):
        assert found.first >= end
        assert found.count >= count and found.period >= period
        assert items[found.first : found.end] == items[found.first : found.first + found.period] * found.count
        end = found.end
    assert end <= len(items)


def test_two_kinds_of_blocks_are_two_repeats() -> None:
    items = ["embed", *"abcd" * 4, "norm", *"wxyzv" * 5, "head"]
    assert find_repeats(items, 4, 4) == [Repeat(1, 4, 4), Repeat(18, 5, 5)]
