"""First steps as bars, one part for each phase: on a terminal, and as an SVG file. Needs rich."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from bench.compile.phases import ALL_PHASES
from bench.compile.rows import CompileRow

BAR_CELLS, SVG_CELLS, LEGEND_COLUMNS = 72, 144, 5
_COLORS = (
    "#4477aa", "#66ccee", "#228833", "#aa3377", "#ee6677", "#ccbb44", "#ee9944", "#997755", "#bbbbbb",
)  # fmt: skip


def bar_cells(seconds: Sequence[float], longest_s: float) -> list[int]:
    """Cells of each part of a bar; rounding never adds up: the bar is as long as the sum of its parts."""
    ends = (round(BAR_CELLS * end_s / longest_s) for end_s in accumulate(seconds, initial=0.0))
    return [max(0, end - begin) for begin, end in pairwise(ends)]


def draw(rows: Sequence[CompileRow]) -> Any:
    """What rich prints: a legend, and a bar for each row."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    legend = Table.grid(padding=(0, 3))
    entries = [Text.assemble(("██ ", color), name) for name, color in zip(ALL_PHASES, _COLORS, strict=True)]
    for begin in range(0, len(entries), LEGEND_COLUMNS):
        legend.add_row(*entries[begin : begin + LEGEND_COLUMNS])
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(no_wrap=True)
    longest_s = max(row.step_s for row in rows)
    for row in rows:
        bar = Text()
        cells = bar_cells([row.phases[name] for name in ALL_PHASES], longest_s)
        for count, color in zip(cells, _COLORS, strict=True):
            bar.append("█" * count, color)
        bar.append(f" {row.step_s:.1f} s")
        grid.add_row(Text(f"{row.label}, {row.backend}, {row.cache}"), f"{row.blocks}", bar)
    return Group(legend, Text(), grid)


def print_picture(rows: Sequence[CompileRow]) -> None:
    """Prints it, at least as wide as its bars."""
    from rich.console import Console

    console = Console(highlight=False)
    console.width = max(console.width, SVG_CELLS)
    console.print(draw(rows))


def write_svg(path: Path, rows: Sequence[CompileRow]) -> None:
    """Writes it."""
    from rich.console import Console

    console = Console(file=io.StringIO(), record=True, width=SVG_CELLS, highlight=False)
    console.print(draw(rows))
    path.write_text(console.export_svg(title="First training step, seconds by phase"), encoding="utf-8")
