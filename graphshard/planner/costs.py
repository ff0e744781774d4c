"""What a bucket of consecutive members takes, and what it holds: counted once, then looked up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from graphshard.planner.memory import copied_out_bytes, freed_by_finish, freed_by_wait, gathered_bytes, held_by_launch
from graphshard.planner.problem import (
    GatherTask,
    Problem,
    Tasks,
    copy_in_us,
    copy_out_us,
    is_flat,
    then_us,
    transfer_us,
)
from graphshard.planner.schedule import Bucket


class BucketCost(NamedTuple):
    """A bucket: its times in us, its memory in bytes.

    Attributes:
        then: stream of the all-reduce behind a reduce-scatter, -1: none.
        need: the position at which a gather must have arrived; of a reduction: 0.
        ready: the first position at which it can be launched.
        in_us: of the copy-in and the launch.
        held: allocated by the launch; `freed`: free once its copy-in is done.
        out: what a gather is copied out to.
        freed_by_wait: free behind the wait; `freed_by_finish`: behind that of the all-reduce that follows.
        frees: (last use, bytes) of the members of a gather.
        live_ranges: (first position, the one behind the last, bytes): what a gather holds before its members are used.
        wire_bytes: as it is sent.
    """

    bucket: Bucket
    stream: int
    then: int
    need: int
    ready: int
    in_us: float
    us: float
    out_us: float
    then_us: float
    held: int
    freed: int
    out: int
    freed_by_wait: int
    freed_by_finish: int
    frees: tuple[tuple[int, int], ...]
    live_ranges: tuple[tuple[int, int, int], ...]
    wire_bytes: int


def gather_cost(problem: Problem, members: tuple[int, ...]) -> BucketCost:
    """Of one bucket of gathers, in order of first use."""
    items = [problem.gathers[i] for i in members]
    held, freed = held_by_launch(items)
    out = copied_out_bytes(items)
    need, flat = min(item.first_use for item in items), is_flat(items)
    return BucketCost(
        bucket=Bucket("gather", members),
        stream=items[0].transfer.stream,
        then=-1,
        need=need,
        ready=max(item.ready for item in items),
        in_us=copy_in_us(items) + problem.launch_us,
        us=transfer_us(items),
        out_us=copy_out_us(items),
        then_us=0.0,
        held=held,
        freed=freed,
        out=out,
        freed_by_wait=freed_by_wait(items),
        freed_by_finish=freed_by_finish(items),
        frees=tuple((item.last_use, gathered_bytes(item, flat)) for item in items),
        live_ranges=tuple(_live_ranges(items, need, held + out)),
        wire_bytes=sum(item.wire_bytes for item in items),
    )


def reduction_cost(problem: Problem, members: tuple[int, ...]) -> BucketCost:
    """Of one bucket of reductions."""
    items = [problem.reductions[i] for i in members]
    held, freed = held_by_launch(items)
    then = items[0].then
    return BucketCost(
        bucket=Bucket("reduce", members),
        stream=items[0].transfer.stream,
        then=-1 if then is None else then.stream,
        need=0,
        ready=max(item.ready for item in items),
        in_us=copy_in_us(items) + problem.launch_us,
        us=transfer_us(items),
        out_us=copy_out_us(items),
        then_us=then_us(items),
        held=held,
        freed=freed,
        out=0,
        freed_by_wait=freed_by_wait(items),
        freed_by_finish=freed_by_finish(items),
        frees=(),
        live_ranges=(),
        wire_bytes=sum(item.wire_bytes for item in items),
    )


def most_gathered_bytes(gather: GatherTask) -> int:
    """Most that one gathered parameter holds until its last use, in whatever bucket."""
    return max(gathered_bytes(gather, flat=True), gathered_bytes(gather, flat=False))


def _live_ranges(items: Sequence[GatherTask], need: int, most: int) -> list[tuple[int, int, int]]:
    # At the first use the buffer and what it is copied out to are there; what is in use then is counted as needed.
    used = sum(most_gathered_bytes(item) for item in items if item.first_use == need)
    found = [(need, need + 1, most - used)]
    waiting = sum(most_gathered_bytes(item) for item in items) - used
    begin = need + 1
    for item in sorted(items, key=lambda item: item.first_use):
        if item.first_use > need:
            if item.first_use > begin:
                found.append((begin, item.first_use, waiting))
                begin = item.first_use
            waiting -= most_gathered_bytes(item)
    return found


def sequences(tasks: Tasks, apart: frozenset[int] = frozenset()) -> list[list[int]]:
    """Tasks whose buckets are intervals: those of one key, in order, without those that stand `apart`."""
    found: dict[int, list[int]] = {}
    keys = [task.key for task in tasks]
    for i, key in enumerate(keys):
        if i not in apart:
            found.setdefault(key, []).append(i)
    return list(found.values())
