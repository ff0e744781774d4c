"""Rows of `bench.overhead` as text."""

from __future__ import annotations

from collections.abc import Sequence

from bench.harness.tables import align
from bench.overhead.rows import StepRow


def step_table(rows: Sequence[StepRow]) -> list[str]:
    """Host time by backend and variant."""
    header = ("backend", "variant", "forward us", "backward us", "total us", "quartiles us", "ratio")
    return align(
        header,
        [
            (
                row.backend,
                row.variant,
                f"{row.forward_us:,.0f}",
                f"{row.backward_us:,.0f}",
                f"{row.total_us:,.0f}",
                f"{row.low_us:,.0f} - {row.high_us:,.0f}",
                f"{row.ratio:.2f}",
            )
            for row in rows
        ],
    )
