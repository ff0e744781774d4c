"""The page of `debug`: one file, no network; all but folded lines of graphs is there without its script."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from importlib import resources

import torch
import torch.distributed as dist

from graphshard.debugging.difference import Lines
from graphshard.debugging.dynamo_code import Frame
from graphshard.debugging.passes_shown import graph_shown, text_shown
from graphshard.debugging.seen import SeenModel, SeenProgram
from graphshard.explain.drawing import asset, memory_curve
from graphshard.explain.markup import escape, framed
from graphshard.explain.page import memory_keys
from graphshard.plan_file.text import plan_text
from graphshard.planning.planned_programs import explained_program, explanation_of, planned_so_far
from graphshard.version import __version__

_COLUMNS = ("program", "flags", ">runs here", ">runs", "collectives of a run", ">passes", ">planner", ">compiler")
_INTRODUCTION = (
    "What became of models while they ran. A <b>graph</b> is shown as it came, then as each pass left it: lines "
    "removed (&minus;), added (+), and those that only moved (&larr; from, &rarr; to); what is unchanged is folded."
)


def page(models: Sequence[SeenModel], elsewhere: Sequence[str], frames: Sequence[Frame], error: str) -> str:
    """The whole document.

    Args:
        models: of which something was seen.
        elsewhere: names of the other compiled models of the process.
        frames: that Dynamo compiled.
        error: that came out, as text; ``""``: none did.
    """
    lines = Lines()
    sections = [(f"model-{i}", model.context.name, _model(model, lines, i)) for i, model in enumerate(models)]
    sections.append(("dynamo", "Dynamo's code", _dynamo(frames)))
    if error:
        failed = '<p class="note bad">The steps ended with this error; what was seen until then is below.</p>'
        sections.insert(0, ("error", "Error", failed + text_shown("traceback", error, opened=True)))
    links = "".join(f'<a href="#{name}">{escape(title)}</a>' for name, title, _ in sections)
    notes = [] if models else ["no compiled model ran inside"]
    notes += [f"compiled, and not run inside: {', '.join(elsewhere)}"] if elsewhere else []
    said = "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    where = (
        f"rank {rank} of {ranks}; graphshard {__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}; {time.strftime('%Y-%m-%d %H:%M:%S')}"
    )
    body = "\n".join(
        f'<section id="{name}"><h2>{escape(title)}</h2>\n{text}</section>' for name, title, text in sections
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>graphshard debug, rank {rank}</title>
<style>
{asset("timeline.css")}{asset("page.css")}{_asset("debug.css")}</style>
</head>
<body>
<header>
<h1>graphshard debug</h1>
<p class="hardware">{escape(where)}</p>
<p class="glossary">{_INTRODUCTION}</p>
<noscript><p class="note">Folded lines of graphs are shown by a script, which does not run here.</p></noscript>
{said}
<nav>{links}</nav>
</header>
{body}
<script type="application/json" id="lines">{lines.json()}</script>
<script>
{_asset("debug.js")}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return resources.files("graphshard.debugging").joinpath(name).read_text(encoding="utf-8")


def _model(model: SeenModel, lines: Lines, number: int) -> str:
    context = model.context
    explained = explanation_of(context.planning, context.report)
    parts = [_programs(model.programs), text_shown("report", f"{context.report}\n", opened=True)]
    if explained.programs:
        parts.append(f"<h3>Plan and timeline</h3>{framed(explained.to_html(), f'plan of {context.name}')}")
        parts.append(f"<h3>Memory over time, as planned</h3>{_memory(model)}")
    else:
        parts.append('<h3>Plan and timeline</h3><p class="quiet">nothing was planned</p>')
    if context.planning is not None and explained.programs:
        stored = plan_text(planned_so_far(context.planning, context.report, context.name))
        parts.append(text_shown("plan file (as `graphshard.save_plan` writes it)", stored))
    shown = [graph for graph in model.graphs if len(graph.steps) > 1 or ".captured" in graph.title]
    parts.append(f"<h3>Graphs, pass by pass</h3>{''.join(graph_shown(graph, lines) for graph in shown)}")
    if unchanged := [graph.title for graph in model.graphs if graph not in shown]:
        parts.append(f'<p class="quiet">left as they came by all passes: {escape(", ".join(unchanged))}</p>')
    before = [program for program in model.programs if not program.title]
    if before:
        parts.append(
            f'<p class="note">{len(before)} of these programs were compiled before: only what became of them.</p>'
        )
        parts += [text_shown(_name(program), program.record.ir) for program in before if program.record.ir]
    parts.append(f"<h3>Generated code</h3>{_code(model.programs, number)}")
    return "\n".join(parts)


def _name(program: SeenProgram) -> str:
    record = program.record
    return program.title or f"{record.where} {record.direction} [{record.flags}]"


def _programs(programs: Sequence[SeenProgram]) -> str:
    rows = []
    for program in programs:
        record = program.record
        sent = ", ".join(f"{count} {kind}" for kind, count in record.collectives.items() if count) or "none"
        rows.append(
            (
                f"{record.where} {record.direction}", record.flags, str(program.runs), str(record.runs), sent,
                f"{record.passes_s * 1e3:.0f} ms", f"{record.planner_s * 1e3:.0f} ms", f"{record.compile_s:.1f} s",
            )
        )  # fmt: skip
    heads = "".join(f"<th{_right(column)}>{escape(column.removeprefix('>'))}</th>" for column in _COLUMNS)
    cells = ["".join(map(_cell, _COLUMNS, row)) for row in rows]
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(column: str, text: str) -> str:
    return f"<td{_right(column)}>{escape(text)}</td>"


def _right(column: str) -> str:
    return ' class="number"' if column.startswith(">") else ""


def _memory(model: SeenModel) -> str:
    drawn = []
    for program in model.programs:
        if (explained := explained_program(program.record, model.context.planning)) is not None:
            caption = f"<figcaption>{escape(explained.title)}{memory_keys(explained)}</figcaption>"
            drawn.append(f'<figure class="chart">{memory_curve(explained)}{caption}</figure>')
    return "".join(drawn)


def _code(programs: Sequence[SeenProgram], number: int) -> str:
    parts: list[str] = []
    known: dict[str, str] = {}  # code -> id of the element that has it
    for program in programs:
        code = program.record.code
        if code is None:
            parts.append(f'<p class="quiet">{escape(_name(program))}: none, it runs operator by operator</p>')
        elif code in known:
            same = f'<a href="#{known[code]}">the same as above</a>'
            parts.append(f'<p class="quiet">{escape(_name(program))}: {same}</p>')
        else:
            known[code] = f"code-{number}-{len(known)}"
            parts.append(text_shown(_name(program), code, identity=known[code]))
    return "".join(parts)


def _dynamo(frames: Sequence[Frame]) -> str:
    if not frames:
        return '<p class="quiet">Dynamo compiled nothing inside</p>'
    parts = []
    for frame in frames:
        shown = [
            text_shown("what Dynamo has made of it", frame.made, opened=True),
            text_shown("the function", frame.original) if frame.original else "",
            text_shown("guards: where one fails, it is compiled again", frame.guards) if frame.guards else "",
        ]
        problem = f'<p class="note">{escape(frame.problem)}</p>' if frame.problem else ""
        parts.append(
            f'<details class="graph"><summary><code>{escape(frame.name)}</code> '
            f'<span class="quiet">[{escape(frame.number)}] {escape(frame.place)}</span></summary>'
            f"{problem}{''.join(shown)}</details>"
        )
    return "".join(parts)
