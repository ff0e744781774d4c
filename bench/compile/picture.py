"""First steps as bars, one part for each phase."""

from __future__ import annotations

from collections.abc import Sequence

from bench.compile.phases import ALL_PHASES
from bench.compile.rows import CompileRow
from bench.harness.bars import Bar

TITLE = "First training step, seconds by phase"


def bars_of(rows: Sequence[CompileRow]) -> list[Bar]:
    """A bar for each row."""
    return [
        Bar(
            (f"{row.label}, {row.backend}, {row.cache}", str(row.blocks)),
            tuple(row.phases[name] for name in ALL_PHASES),
            f"{row.step_s:.1f} s",
        )
        for row in rows
    ]
