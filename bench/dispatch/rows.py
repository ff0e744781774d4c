"""Rows of `bench.dispatch`. No process, no clock: tested without."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.dispatch.samples import DispatchTime, FirstFlip


@dataclass(frozen=True)
class DispatchRow:
    """What choosing the programs of a step takes; medians.

    Attributes:
        bind_us: finding the shards behind the arguments.
        states_us: reading what shards hold and what flags ask.
        look_up_us: key and dictionary.
        chosen_us: median of the sums of these.
        low_us: lower quartile of the sums.
        high_us: upper quartile of the sums.
        step_us: forward and backward.
        share: of `chosen_us` in `step_us`.
        steps: how many were measured.
    """

    case: str
    bind_us: float
    states_us: float
    look_up_us: float
    chosen_us: float
    low_us: float
    high_us: float
    step_us: float
    share: float
    steps: int


def dispatch_row(case: str, times: Sequence[DispatchTime]) -> DispatchRow:
    """The row of one case."""
    low_us, chosen_us, high_us = statistics.quantiles([1e6 * time.chosen_s for time in times], n=4, method="inclusive")
    step_us = 1e6 * statistics.median(time.step_s for time in times)
    return DispatchRow(
        case,
        1e6 * statistics.median(time.bind_s for time in times),
        1e6 * statistics.median(time.states_s for time in times),
        1e6 * statistics.median(time.look_up_s for time in times),
        chosen_us,
        low_us,
        high_us,
        step_us,
        chosen_us / step_us,
        len(times),
    )


@dataclass(frozen=True)
class FlipRow:
    """What it takes to set a flag and to set it back.

    Attributes:
        lowered: programs that were lowered the first time, such as ``"1 backward"``.
        regions: graphs that were captured the first time.
        first_ms: what the first two steps took beyond ordinary ones.
        lowering_ms: of that, graphshard's passes and their checks.
        later_us: choosing programs, in a step behind a flip, once all are there; median.
        still_us: the same in steps without a flip, of either setting; median.
        set_us: the user's call that sets the flag; median.
    """

    flag: str
    lowered: str
    regions: int
    first_ms: float
    lowering_ms: float
    later_us: float
    still_us: float
    set_us: float


def flip_row(flag: str, first: FirstFlip, flipped: Sequence[DispatchTime], still: Sequence[DispatchTime]) -> FlipRow:
    """The row of one flag."""
    return FlipRow(
        flag,
        ", ".join(f"{count} {direction}" for direction, count in sorted(first.programs.items())) or "none",
        first.regions,
        1e3 * first.added_s,
        1e3 * first.lowering_s,
        1e6 * statistics.median(time.chosen_s for time in flipped),
        1e6 * statistics.median(time.chosen_s for time in still),
        1e6 * statistics.median(time.set_s for time in flipped),
    )
