"""Rows of `bench.dispatch` as text."""

from __future__ import annotations

from collections.abc import Sequence

from bench.dispatch.rows import DispatchRow, FlipRow
from bench.harness.tables import align


def dispatch_table(rows: Sequence[DispatchRow]) -> list[str]:
    """What choosing programs takes, by case."""
    return align(
        ("case", "", "bind us", "states us", "look-up us", "sum us", "quartiles us", "step us", "share"),
        [
            (
                row.case,
                "",
                f"{row.bind_us:,.0f}",
                f"{row.states_us:,.0f}",
                f"{row.look_up_us:,.0f}",
                f"{row.chosen_us:,.0f}",
                f"{row.low_us:,.0f} - {row.high_us:,.0f}",
                f"{row.step_us:,.0f}",
                f"{row.share:.1%}",
            )
            for row in rows
        ],
    )


def flip_table(rows: Sequence[FlipRow]) -> list[str]:
    """What flipping flags takes, by flag."""
    return align(
        ("flag", "lowered", "captured", "first ms", "lowering ms", "later us", "without us", "set us"),
        [
            (
                row.flag,
                row.lowered,
                str(row.regions),
                f"{row.first_ms:,.1f}",
                f"{row.lowering_ms:,.1f}",
                f"{row.later_us:,.0f}",
                f"{row.still_us:,.0f}",
                f"{row.set_us:,.0f}",
            )
            for row in rows
        ],
    )
