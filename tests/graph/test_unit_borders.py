"""Parts of units are told apart where the least goes across, and equal ones are found wherever they stand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph

from graphshard.graph.repeats import find_repeats
from graphshard.graph.unit_borders import Read, crossings, equal_parts, has_equal_parts, unit_borders

BLOCKS = {"a": "embdx", "b": "normmix", "c": "wxyz"}
LEAST = 3


def laid_out(kinds: str) -> tuple[str, list[int]]:
    """Items of blocks one behind the other, and where each begins."""
    items, borders = "", []
    for kind in kinds:
        borders.append(len(items))
        items += BLOCKS[kind]
    return items, borders


@given(st.text("abc", max_size=20), st.sampled_from(["", "!", "?!"]))
def test_as_many_equal_parts_are_found_as_there_are(kinds: str, tail: str) -> None:
    items, borders = laid_out(kinds)
    found = equal_parts(items + tail, borders, set(), LEAST, 1)
    by_items = {items[parts[0].start : parts[0].stop]: len(parts) for parts in found}
    # The last one begins as others, if there are any, and goes on.
    assert by_items == {BLOCKS[kind]: kinds.count(kind) for kind in set(kinds) if kinds.count(kind) >= LEAST} or (
        tail and kinds.count(kinds[-1]) == LEAST
    )


def test_last_part_counts_as_far_as_it_is_equal() -> None:
    items, borders = laid_out("abaa")
    assert equal_parts(items + "norm", borders, set(), LEAST, 1) == [[range(5), range(12, 17), range(17, 22)]]


def test_places_that_are_taken_and_short_parts_are_left_out() -> None:
    items, borders = laid_out("cacaca")
    assert [len(parts) for parts in equal_parts(items, borders, set(), LEAST, 1)] == [3, 3]
    assert [len(parts) for parts in equal_parts(items, borders, set(), LEAST, 5)] == [3]
    assert [len(parts) for parts in equal_parts(items, borders, {5}, LEAST, 1)] == [3]
    assert [len(parts) for parts in equal_parts(items, borders, set(), LEAST, 9, [2] * len(items))] == [3]


@pytest.mark.parametrize(
    ("kinds", "expected"), [("aabaabaabaab", True), ("abcabababab", True), ("abababab", False), ("aaaa", False)]
)
def test_a_repeat_of_equal_parts_is_told_from_one_block_of_several_units(kinds: str, expected: bool) -> None:
    items, borders = laid_out(kinds)
    (repeat,) = find_repeats(items, 4, 4)
    assert has_equal_parts(repeat, equal_parts(items, borders, set(), 4, 1)) is expected
    assert not has_equal_parts(repeat, [])


def test_a_part_begins_where_the_least_goes_across_and_fits() -> None:
    reads = [Read(1, 2, "first"), Read(3, 3, "first"), Read(8, 8, "second")]
    crossing = [0, 1, 1, 2, 2, 1, 1, 2, 2]
    items = "embed,+nw"
    assert unit_borders(reads, crossing, lambda place: True, items) == [6]
    assert unit_borders(reads, crossing, lambda place: place != 6, items) == [5]
    assert unit_borders(reads, crossing, lambda place: place > 8, items) == []
    assert unit_borders([], crossing, lambda place: True, items) == []
    # One that is read until behind the next unit's first read.
    assert unit_borders([Read(1, 9, "first"), Read(8, 8, "second")], crossing, lambda place: True, items) == [8]


def test_parts_that_read_alike_begin_alike() -> None:
    # First a prologue across which less goes, then a sum that one of the layers has behind it.
    items = "embed" + "mask" + "nWx" + "+" + "nWx" + "+" + "nWx"
    starts = [place for place, item in enumerate(items) if item == "W"]
    reads = [Read(0, 4, "embed"), *(Read(place, place, f"{place}") for place in starts)]
    crossing = [3] * len(items)
    for place in (5, starts[1] - 2, starts[2] - 1):
        crossing[place] = 1
    borders = unit_borders(reads, crossing, lambda place: True, items)
    assert borders == [start - 1 for start in starts]
    assert equal_parts(items, borders, set(), LEAST, 1) == [[range(9, 12), range(13, 16), range(17, 20)]]
    # One that does something else begins where the least goes across.
    others = items.replace("W", "V", 1)
    assert unit_borders(reads, crossing, lambda place: True, others) == [5, *(start - 1 for start in starts[1:])]
    # One of them in which no place fits is none of them.
    assert unit_borders(reads, crossing, lambda place: not 11 <= place <= 14, items) == [starts[0] - 1, starts[2] - 1]
    # Where none fits in all, each begins where the least goes across.
    assert unit_borders(reads, crossing, lambda place: place in (5, 12, 17), items) == [5, 12, 17]


def test_of_kinds_as_frequent_the_shortest_is_what_others_begin_as() -> None:
    items = "abcde" + "abc" + "abcd"
    assert equal_parts(items, [0, 5, 8], set(), LEAST, 1) == [[range(3), range(5, 8), range(8, 11)]]


def test_crossings_count_what_is_read_behind() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    a = graph.call_function(abs, (x,))
    b = graph.call_function(abs, (a,))
    c = graph.call_function(max, (a, b))
    graph.output(c)
    nodes = [a, b, c]
    number = {node: place for place, node in enumerate(nodes)}
    assert crossings(nodes, number, lambda node: 5 if node is a else 1) == [0, 5, 6, 0]
