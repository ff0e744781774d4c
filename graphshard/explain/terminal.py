"""An explanation on a terminal: tables drawn by rich, where it is installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from graphshard.explain.contents import Section, Table, overview, section
from graphshard.explain.explanation import Explanation
from graphshard.explain.plain_text import GLOSSARY, MOST_ROWS, fewer_rows, left_out_line
from graphshard.explain.program import PlannedProgram

if TYPE_CHECKING:
    from rich.console import Console


def print_explanation(explanation: Explanation, top: int = 5, file: TextIO | None = None) -> None:
    """Prints it to `file` (standard output): in colour on a terminal that rich can draw on, else as plain text.

    Args:
        explanation: what `graphshard.explain` returns.
        top: how many of the longest waits of each program to show.
        file: where to.
    """
    out = sys.stdout if file is None else file
    try:
        from rich.console import Console
    except ImportError:
        out.write(explanation.to_text(top))
        return
    console = Console(file=out, highlight=False)
    if console.is_terminal:
        _draw(console, explanation.programs, explanation.hardware, explanation.notes, top)
    else:
        out.write(explanation.to_text(top))


def _draw(console: Console, programs: Sequence[PlannedProgram], hardware: str, notes: Sequence[str], top: int) -> None:
    from rich.markup import escape

    console.print(f"[bold]graphshard plan for {escape(hardware)}[/]")
    console.print(GLOSSARY, style="dim")
    for note in notes:
        console.print(f"[yellow]note:[/] {escape(note)}")
    if len(programs) > 1:
        _draw_table(console, overview(programs))
    for program in programs:
        _draw_section(console, section(program, top))


def _draw_section(console: Console, found: Section) -> None:
    from rich.markup import escape
    from rich.rule import Rule
    from rich.table import Table as Grid

    console.print()
    console.print(Rule(f"[bold]{escape(found.title)}[/]", align="left"))
    console.print(escape(found.verdict))
    grid = Grid.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(justify="right", style="bold")
    grid.add_column()
    for figure in found.figures:
        grid.add_row(escape(figure.name), escape(figure.value), escape(figure.remark))
    console.print(grid)
    for table in found.tables:
        _draw_table(console, table)


def _draw_table(console: Console, table: Table) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table as Drawn

    table, left_out = fewer_rows(table)
    drawn = Drawn(title=escape(table.title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    drawn.caption = escape(table.note) or None
    drawn.caption_justify = "left"
    console.print()
    for column in table.columns:
        right = column.startswith(">")
        whole = right or column == table.columns[0]
        name = column.removeprefix(">")
        drawn.add_column(name, justify="right" if right else "left", no_wrap=whole, overflow="fold")
    for number, row in enumerate(table.rows, 1):
        drawn.add_row(*(escape(cell) for cell in row))
        if left_out and number == MOST_ROWS // 2:
            drawn.add_row(left_out_line(left_out))
    console.print(drawn)
