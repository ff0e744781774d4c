"""An explanation as plain text, aligned in columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace

from graphshard.explain.contents import Section, Table, overview, section
from graphshard.explain.program import PlannedProgram

WIDTH = 120
# Of a cell; a longer one loses its middle. Prose, in the last column, is wrapped instead.
CELL = 44
MOST_ROWS = 40
GLOSSARY = (
    "Times are predicted by simulation. A bucket is one collective for several parameters; a coalesced one takes their "
    "tensors one by one, without copies into and out of a buffer. Exposed: time that the "
    "computation stands still, waiting for a collective. Lower bound: what no schedule can beat."
)


def plain_text(programs: Sequence[PlannedProgram], hardware: str, notes: Sequence[str], top: int) -> str:
    """All of it; of the waits the `top` longest, of long tables the first and the last rows."""
    lines = [f"graphshard plan for {hardware}", *textwrap.wrap(GLOSSARY, WIDTH)]
    for note in notes:
        lines += textwrap.wrap(f"note: {note}", WIDTH, subsequent_indent="      ")
    if len(programs) > 1:
        lines += ["", *_table(overview(programs), "")]
    for program in programs:
        lines += ["", *_section(section(program, top))]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def summary_text(programs: Sequence[PlannedProgram]) -> str:
    """One line for each program."""
    return "\n".join(line.rstrip() for line in _table(overview(programs), "")) + "\n"


def fewer_rows(table: Table) -> tuple[Table, int]:
    """The first and the last rows of a long table, and how many are left out behind the first half."""
    left_out = len(table.rows) - MOST_ROWS
    if left_out <= 0:
        return table, 0
    half = MOST_ROWS // 2
    return replace(table, rows=(*table.rows[:half], *table.rows[-half:]), buckets=()), left_out


def left_out_line(count: int) -> str:
    """Stands in the middle of a table that was cut."""
    return f"... {count} more; save('plan.html') shows all ..."


def _section(found: Section) -> Iterator[str]:
    yield found.title
    yield "=" * len(found.title)
    yield from textwrap.wrap(found.verdict, WIDTH)
    names = max(len(figure.name) for figure in found.figures)
    values = max(len(figure.value) for figure in found.figures)
    for figure in found.figures:
        yield f"{figure.name:{names}}  {figure.value:>{values}}  {figure.remark}"
    for table in found.tables:
        yield ""
        yield from _table(table, "  ")


def _table(table: Table, indent: str) -> Iterator[str]:
    table, left_out = fewer_rows(table)
    names = [column.removeprefix(">") for column in table.columns]
    fixed = len(names) - 1 if table.prose else len(names)
    rows = [[_shortened(cell) if i < fixed else cell for i, cell in enumerate(row)] for row in table.rows]
    widths = [max(len(row[i]) for row in (names, *rows)) for i in range(fixed)]
    yield table.title
    for number, row in enumerate([names, *rows]):
        cells = [
            cell.rjust(width) if column.startswith(">") else cell.ljust(width)
            for cell, width, column in zip(row, widths, table.columns, strict=False)
        ]
        line = indent + "  ".join(cells)
        if table.prose:
            prose = textwrap.wrap(row[-1], max(40, WIDTH - len(line) - 2)) or [""]
            yield f"{line}  {prose[0]}"
            yield from (" " * (len(line) + 2) + more for more in prose[1:])
        else:
            yield line
        if left_out and number == MOST_ROWS // 2:
            yield indent + left_out_line(left_out)
    if table.note:
        yield indent + table.note


def _shortened(cell: str) -> str:
    if len(cell) <= CELL:
        return cell
    kept = CELL - 3
    return f"{cell[: kept - kept // 2]}...{cell[-(kept // 2) :]}"
