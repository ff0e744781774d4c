"""What graphshard takes from the inside of CPython."""

from __future__ import annotations

import resource
from collections.abc import Callable

from graphshard.compat.interpreter import with_room

CALLS = 2000


def leaf() -> None:
    pass


def page_faults(depth: int, call: Callable[[Callable[[], None]], None]) -> int:
    """Of `CALLS` calls, from a loop that lies so deep."""
    if depth:
        return page_faults(depth - 1, call)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    call(calls)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def calls() -> None:
    for _ in range(CALLS):
        leaf()


def most_page_faults(run: Callable[[Callable[[], None]], None]) -> int:
    """Over depths that end in every place of a chunk."""
    return max(page_faults(depth, run) for depth in range(300))


def test_loop_of_calls_maps_memory_where_it_begins_at_the_end_of_a_chunk() -> None:
    """Should this fail, CPython has mended it, and `with_room` has no purpose."""
    assert most_page_faults(lambda function: function()) >= CALLS


def test_loop_of_calls_with_room_maps_no_memory_wherever_it_begins() -> None:
    assert most_page_faults(with_room) < CALLS / 10


def test_result_is_that_of_the_function() -> None:
    assert with_room(divmod, 7, 2) == (3, 1)
    assert with_room(dict, a=1) == {"a": 1}
