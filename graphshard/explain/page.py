"""An explanation as one HTML page: no network, no other file; it is whole without its script, which adds zoom."""

from __future__ import annotations

import re
from collections.abc import Sequence

from graphshard.explain.contents import CATEGORIES, Table, overview, section
from graphshard.explain.drawing import asset, timeline
from graphshard.explain.lanes import KINDS, lanes_of
from graphshard.explain.markup import escape
from graphshard.explain.program import PlannedProgram

# Up to so many rows a list of buckets is open at first.
OPEN_ROWS = 40
_GLOSSARY = (
    "Times are predicted by simulation. A <b>bucket</b> is one collective for several parameters. <b>Exposed</b>: time "
    "that the computation stands still, waiting for a collective (red). <b>Lower bound</b>: what no schedule can beat."
)
_HINT = "Point at a bar for details, click it to see all of its bucket. Ctrl + wheel zooms, dragging moves."
_NAMES = {"bucket", "collective", "launched before", "awaited before", "first and last", "schedule"}


def page(programs: Sequence[PlannedProgram], hardware: str, notes: Sequence[str]) -> str:
    """The whole document."""
    said = "\n".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    summary = ""
    if len(programs) > 1:
        summary = _table(overview(programs), links=[f"#program-{i}" for i in range(len(programs))])
    body = "\n".join(_program(program, i) for i, program in enumerate(programs))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>graphshard plan</title>
<style>
{asset("timeline.css")}{asset("page.css")}</style>
</head>
<body>
<header>
<h1>graphshard plan</h1>
<p class="hardware">for {escape(hardware)}</p>
<p class="glossary">{_GLOSSARY}</p>
{said}
{summary}
</header>
{body}
<div id="tip" role="tooltip"></div>
<script>
{asset("page.js")}</script>
</body>
</html>
"""


def _program(program: PlannedProgram, number: int) -> str:
    found = section(program)
    tiles = "".join(
        f'<div class="tile"><div class="quiet">{escape(figure.name)}</div>'
        f'<div class="value">{escape(figure.value)}</div><div class="remark">{escape(figure.remark)}</div></div>'
        for figure in found.figures
    )
    listed = found.tables[-1:] if program.buckets else ()
    tables = found.tables[: len(found.tables) - len(listed)]
    narrow = "".join(_titled(table) for table in tables if not table.prose and len(table.columns) < 5)
    wide = "".join(_titled(table) for table in tables if table.prose or len(table.columns) >= 5)
    return f"""<section class="program" id="program-{number}">
<h2>{escape(program.title)}<span class="pill">plan: {escape(program.plan)}</span></h2>
<p class="verdict">{escape(found.verdict)}</p>
<div class="tiles">{tiles}</div>
{_chart(program)}
{wide}
<div class="columns">{narrow}</div>
{"".join(_buckets(table) for table in listed)}
</section>"""


def _chart(program: PlannedProgram) -> str:
    drawn = {bar.kind for lane in lanes_of(program) for bar in lane.bars}
    keys = "".join(
        f'<span class="key"><svg><rect class="{kind}" width="12" height="12"/></svg>{words}</span>'
        for kind, words in KINDS.items()
        if kind in drawn
    )
    return f"""<figure class="chart">
<div class="bar-of-tools">{keys}<span class="zoom"><button class="in" type="button" aria-label="zoom in">+</button>
<button class="out" type="button" aria-label="zoom out">&minus;</button>
<button class="all" type="button">all</button></span></div>
{timeline(program)[0]}<figcaption>{memory_keys(program)}<span class="quiet">{_HINT}</span></figcaption>
</figure>"""


def memory_keys(program: PlannedProgram) -> str:
    """What the colours of memory mean, those that are drawn."""
    keys = "".join(
        f'<span class="key"><svg><path class="memory {name.removesuffix("_bytes")}" d="M0,0h12v12h-12Z"/></svg>'
        f"{words}</span>"
        for name, words in CATEGORIES.items()
        if any(getattr(live, name) for live in program.live)
    )
    return f'<div class="bar-of-tools"><span class="quiet">memory:</span>{keys}</div>'


def _buckets(table: Table) -> str:
    opened = " open" if len(table.rows) <= OPEN_ROWS else ""
    return (
        f"<details{opened}><summary>{escape(table.title)} ({len(table.rows)})</summary>"
        f'<input class="filter" type="search" placeholder="filter by name" aria-label="filter buckets">'
        f'<div class="scroll">{_table(table)}</div></details>'
    )


def _titled(table: Table) -> str:
    drawn = _table(table)
    if len(table.rows) > 12:
        drawn = f'<div class="scroll">{drawn}</div>'
    note = f'<p class="quiet">{escape(table.note)}</p>' if table.note else ""
    return f"<div><h3>{escape(table.title)}</h3>{drawn}{note}</div>"


def _table(table: Table, links: Sequence[str] = ()) -> str:
    heads = "".join(
        f"<th data-sort{_class('number' if column.startswith('>') else '')}>{escape(column.removeprefix('>'))}</th>"
        for column in table.columns
    )
    rows = []
    for number, row in enumerate(table.rows):
        cells = [_cell(table, column, cell) for column, cell in enumerate(row)]
        if links:
            cells[0] = f'<td><a href="{links[number]}">{escape(row[0])}</a></td>'
        bucket = table.buckets[number] if table.buckets else -1
        marked = f' data-b="{bucket}"' if bucket >= 0 else ""
        rows.append(f"<tr{marked}{_class('mine' if row[0] == 'this plan' else '')}>{''.join(cells)}</tr>")
    body = "\n".join(rows)
    return f'<table class="sortable"><thead><tr>{heads}</tr></thead><tbody>\n{body}\n</tbody></table>'


def _cell(table: Table, column: int, cell: str) -> str:
    name = table.columns[column]
    if name == ">share" and cell.endswith(" %"):
        return f'<td class="number share" style="--part: {escape(cell.removesuffix(" %"))}%">{escape(cell)}</td>'
    if name.startswith(">"):
        return f'<td class="number">{escape(cell)}</td>'
    if table.prose and column == len(table.columns) - 1:
        return f'<td class="prose">{_with_code(cell)}</td>'
    return f"<td{_class('name' if name in _NAMES else '')}>{escape(cell)}</td>"


def _with_code(sentence: str) -> str:
    return re.sub("`([^`]*)`", r"<code>\1</code>", escape(sentence))


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""
