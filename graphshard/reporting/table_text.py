"""Tables on a terminal: drawn by rich where it is installed and the output is a terminal, else plain columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO


def write_table(out: TextIO, columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Writes a table.

    Args:
        out: where to.
        columns: their headings; one that begins with ``>`` is aligned to the right.
        rows: texts, one for each column.
        title: a line above it.
    """
    if out.isatty():
        try:
            _draw(out, columns, rows, title)
        except ImportError:
            pass
        else:
            return
    out.write((f"{title}\n" if title else "") + plain_table(columns, rows))


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same without rich: columns as wide as their longest text, two spaces apart."""
    right = [column.startswith(">") for column in columns]
    lines = [[column.removeprefix(">") for column in columns], *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    text = ""
    for line in lines:
        cells = (
            cell.rjust(width) if aligned else cell.ljust(width)
            for cell, width, aligned in zip(line, widths, right, strict=True)
        )
        text += f"  {'  '.join(cells).rstrip()}\n"
    return text


def _draw(out: TextIO, columns: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title) or None, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    for row in rows:
        table.add_row(*map(escape, row))
    Console(file=out, highlight=False).print(table)
