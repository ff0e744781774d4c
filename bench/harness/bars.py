"""Bars of several parts: on a terminal, and as an SVG file. Needs rich."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

BAR_CELLS, SVG_CELLS, LEGEND_COLUMNS = 72, 144, 5
_COLORS = (
    "#4477aa", "#66ccee", "#228833", "#aa3377", "#ee6677", "#ccbb44", "#ee9944", "#997755", "#bbbbbb",
)  # fmt: skip


@dataclass(frozen=True)
class Bar:
    """One of several.

    Attributes:
        labels: in front of it, a column each.
        parts: lengths, in one unit for all bars.
        text: behind it.
    """

    labels: tuple[str, ...]
    parts: tuple[float, ...]
    text: str


def bar_cells(parts: Sequence[float], longest: float) -> list[int]:
    """Cells of each part of a bar; rounding never adds up: the bar is as long as the sum of its parts."""
    ends = (round(BAR_CELLS * end / longest) for end in accumulate(parts, initial=0.0))
    return [max(0, end - begin) for begin, end in pairwise(ends)]


def draw_bars(names: Sequence[str], bars: Sequence[Bar]) -> Any:
    """What rich prints: a legend with the names of the parts, and the bars."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    legend = Table.grid(padding=(0, 3))
    entries = [Text.assemble(("██ ", color), name) for name, color in zip(names, _COLORS, strict=False)]
    for begin in range(0, len(entries), LEGEND_COLUMNS):
        legend.add_row(*entries[begin : begin + LEGEND_COLUMNS])
    grid = Table.grid(padding=(0, 1))
    for column in range(len(bars[0].labels) + 1):
        grid.add_column(justify="right" if column else "left", no_wrap=True)
    grid.columns[-1].justify = "left"
    longest = max(sum(bar.parts) for bar in bars)
    for bar in bars:
        drawn = Text()
        for count, color in zip(bar_cells(bar.parts, longest), _COLORS, strict=False):
            drawn.append("█" * count, color)
        drawn.append(f" {bar.text}")
        grid.add_row(*map(Text, bar.labels), drawn)
    return Group(legend, Text(), grid)


def print_bars(names: Sequence[str], bars: Sequence[Bar]) -> None:
    """Prints them, at least as wide as they are."""
    from rich.console import Console

    console = Console(highlight=False)
    console.width = max(console.width, SVG_CELLS)
    console.print(draw_bars(names, bars))


def write_svg(path: Path, title: str, names: Sequence[str], bars: Sequence[Bar]) -> None:
    """Writes them to a file."""
    from rich.console import Console

    console = Console(file=io.StringIO(), record=True, width=SVG_CELLS, highlight=False)
    console.print(draw_bars(names, bars))
    path.write_text(console.export_svg(title=title), encoding="utf-8")
