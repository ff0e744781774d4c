"""A graph on its way through passes, and other texts, as elements of a page."""

from __future__ import annotations

from graphshard.debugging.difference import Change, Difference, Lines, difference
from graphshard.debugging.seen import SeenGraph
from graphshard.explain.markup import escape, writable
from graphshard.reporting.artifacts import Snapshot

_SIGNS = {"same": " ", "removed": "\N{MINUS SIGN}", "added": "+", "left": "←", "came": "→"}
# More characters of what a pass has decided are folded.
_SHORT = 300


def text_shown(title: str, text: str, opened: bool = False, identity: str = "") -> str:
    """A text that is folded under its title."""
    attributes = (f' id="{identity}"' if identity else "") + (" open" if opened else "")
    count = len(text.splitlines())
    return (
        f'<details class="text"{attributes}><summary>{escape(title)} '
        f'<span class="quiet">{count} line{"s" * (count != 1)}</span></summary>'
        f"<pre>{escape(text)}</pre></details>"
    )


def graph_shown(graph: SeenGraph, lines: Lines) -> str:
    """A graph as it came, and what each pass has changed of it.

    Args:
        graph: to show.
        lines: gets those of the graph.
    """
    before = _lines(graph.steps[0])
    parts = [_whole("as it came" if graph.steps[0].number == 0 else _step(graph.steps[0]), lines.add(before), before)]
    for snapshot in graph.steps[1:]:
        after = _lines(snapshot)
        parts.append(_pass(snapshot, difference(before, after), lines.add(after), after))
        before = after
    passes = len(graph.steps) - 1
    said = f"{len(before)} lines in the end, {passes} pass{'es' * (passes != 1)}"
    if graph.attempts > 1:
        said += (
            f"; made {graph.attempts} times, as for a budget or for what ranks agree on, of which this is the one taken"
        )
    summary = f'<code>{escape(graph.title)}</code> <span class="quiet">{said}</span>'
    return f'<details class="graph"><summary>{summary}</summary>{"".join(parts)}</details>'


def _lines(snapshot: Snapshot) -> list[str]:
    return writable(snapshot.text).splitlines()


def _step(snapshot: Snapshot) -> str:
    return f"{snapshot.number}. {snapshot.step}"


def _pass(snapshot: Snapshot, found: Difference, number: int, lines: list[str]) -> str:
    counts = f"+{found.added} \N{MINUS SIGN}{found.removed}" + (f", {found.moved} moved" if found.moved else "")
    if not (found.added or found.removed or found.moved):
        counts = "no line changed: what it decided is carried out by later passes"
    edit = f'<p class="edit">{escape(snapshot.edit)}</p>'
    if len(snapshot.edit) > _SHORT:
        edit = text_shown("what it decided", snapshot.edit)
    changes = "".join(_change(change, number) for change in found.changes)
    return (
        f'<details class="pass"><summary>{escape(_step(snapshot))} <span class="quiet">{counts}</span></summary>{edit}'
        f'<div class="lines">{changes}</div>{_whole("the whole graph", number, lines)}</details>'
    )


def _change(change: Change, number: int) -> str:
    if change.kind == "folded":
        return _folded(f"{change.last - change.first} unchanged lines", number, change.first, change.last)
    return f'<div class="{change.kind}">{_SIGNS[change.kind]} {escape(change.text)}</div>'


def _whole(title: str, number: int, lines: list[str]) -> str:
    return f'<div class="lines whole">{_folded(f"{escape(title)}, {len(lines)} lines", number, 0, len(lines))}</div>'


def _folded(title: str, number: int, first: int, last: int) -> str:
    return (
        f'<details class="folded" data-graph="{number}" data-first="{first}" data-last="{last}">'
        f"<summary>{title}</summary></details>"
    )
