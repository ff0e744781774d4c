"""Timelines as SVG: of the page, and as a picture of their own."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from math import ceil, floor, log10

from graphshard.explain.contents import CATEGORIES, figures
from graphshard.explain.lanes import KINDS, Bar, Lane, described, lanes_of
from graphshard.explain.markup import escape
from graphshard.explain.memory_steps import memory_steps
from graphshard.explain.program import PlannedProgram
from graphshard.explain.quantities import format_bytes

WIDTH, LEFT, RIGHT = 1200, 132, 1192
AXIS, LANE, MEASURED, GAP, MEMORY = 24, 30, 18, 8, 92
# Of the font of labels, in pixels: a letter's width.
LETTER = 6.3


def asset(name: str) -> str:
    """A file beside this one."""
    return resources.files("graphshard.explain").joinpath(name).read_text(encoding="utf-8")


def drawing(programs: Sequence[PlannedProgram], hardware: str) -> str:
    """One picture with the timeline of each program, below one another."""
    parts, y = [], 86
    for program in programs:
        svg, height = timeline(program, y=y + 30)
        summary = ", ".join(f"{figure.name} {figure.value}" for figure in figures(program))
        parts.append(
            f'<text class="title" x="16" y="{y + 14}">{escape(program.title)}'
            f'<tspan class="quiet" dx="12">plan: {escape(program.plan)}; {escape(summary)}</tspan></text>\n{svg}'
        )
        y += height + 54
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" '
        f'height="{y}">\n<style>{asset("timeline.css")}</style>\n<rect class="paper" width="100%" height="100%"/>\n'
        f'<text class="title" x="16" y="26">graphshard plan for {escape(hardware)}</text>\n'
        f"{_legend()}\n{''.join(parts)}</svg>\n"
    )


def timeline(program: PlannedProgram, y: int = 0) -> tuple[str, int]:
    """An ``<svg>`` element, to be styled by timeline.css, and its height in pixels.

    Bars have microseconds as x, in an inner ``<svg>`` that a script can zoom by its `viewBox` alone.
    """
    lanes = lanes_of(program)
    end_us = max([program.simulation.step_us, 1e-3, *(bar.end_us for lane in lanes for bar in lane.bars)])
    tops, top = [], AXIS + 6
    for lane in lanes:
        tops.append(top)
        top += _height(lane) + GAP
    memory_top, height = top + 14, top + 14 + MEMORY + 6
    bars = "\n".join(
        _rect(bar, i, top, lane) for lane, top in zip(lanes, tops, strict=True) for i, bar in enumerate(lane.bars)
    )
    names = "".join(
        f'<text class="lane" x="{LEFT - 10}" y="{top + _height(lane) / 2 + 4:g}">{escape(_shortened(lane.name, 18))}'
        f"</text>"
        for lane, top in zip(lanes, tops, strict=True)
    )
    labels = "".join(
        _label(bar, top + _height(lane) / 2 + 4, end_us)
        for lane, top in zip(lanes, tops, strict=True)
        for bar in lane.bars
        if not lane.measured
    )
    areas, notes = _memory(program, end_us, memory_top)
    svg = (
        f'<svg class="timeline" x="0" y="{y}" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" aria-label="timeline of {escape(program.title)}" data-end="{end_us:.3f}">\n'
        f'<g class="axis">{_axis(end_us, height)}</g>\n'
        f'<svg class="bars" x="{LEFT}" y="0" width="{RIGHT - LEFT}" height="{height}" '
        f'viewBox="0 0 {end_us:.3f} {height}" preserveAspectRatio="none">\n{areas}\n{bars}\n</svg>\n'
        f'<g class="names">{names}{notes}</g>\n<g class="labels">{labels}</g>\n</svg>\n'
    )
    return svg, height


def memory_curve(program: PlannedProgram) -> str:
    """The memory of a timeline alone, over time, as an ``<svg>`` element to be styled by timeline.css."""
    end_us, height = max(program.simulation.step_us, 1e-3), MEMORY + AXIS + 12
    areas, notes = _memory(program, end_us, AXIS + 6)
    return (
        f'<svg class="timeline" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" aria-label="memory of {escape(program.title)}">\n<g class="axis">{_axis(end_us, height)}</g>\n'
        f'<svg class="bars" x="{LEFT}" y="0" width="{RIGHT - LEFT}" height="{height}" '
        f'viewBox="0 0 {end_us:.3f} {height}" preserveAspectRatio="none">\n{areas}\n</svg>\n'
        f'<g class="names">{notes}</g>\n</svg>\n'
    )


def _height(lane: Lane) -> int:
    return MEASURED if lane.measured else LANE


def _rect(bar: Bar, number: int, top: int, lane: Lane) -> str:
    # Neighbours differ in shade: a line between them would hide bars that are thinner than it.
    classes = f"{bar.kind}{' odd' if number % 2 else ''}{' measured' if lane.measured else ''}"
    bucket = f' data-b="{bar.bucket}"' if bar.bucket >= 0 else ""
    return (
        f'<rect class="{classes}"{bucket} x="{bar.start_us:.2f}" y="{top}" width="{bar.end_us - bar.start_us:.2f}" '
        f'height="{_height(lane)}"><title>{escape(described(bar))}</title></rect>'
    )


def _label(bar: Bar, y: float, end_us: float) -> str:
    scale = (RIGHT - LEFT) / end_us
    letters = int(((bar.end_us - bar.start_us) * scale - 8) / LETTER)
    if letters < 4:
        return ""
    x = LEFT + bar.start_us * scale + 4
    return f'<text class="on-{bar.kind}" x="{x:.1f}" y="{y:g}">{escape(_shortened(bar.name, letters))}</text>'


def _shortened(name: str, letters: int) -> str:
    return name if len(name) <= letters else f"{name[: letters - 1]}…"


def _axis(end_us: float, height: int) -> str:
    lines = []
    step_us = _tick_us(end_us / 8)
    for number in range(floor(end_us / step_us) + 1):
        x = LEFT + number * step_us * (RIGHT - LEFT) / end_us
        lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{AXIS - 4}" y2="{height}"/>')
        lines.append(f'<text x="{x:.1f}" y="{AXIS - 9}">{_tick_name(number * step_us, step_us)}</text>')
    return "".join(lines)


def _tick_us(about_us: float) -> float:
    """1, 2 or 5 times a power of ten, at least `about_us`."""
    power = 10.0 ** floor(log10(about_us))
    return float(next(power * factor for factor in (1, 2, 5, 10) if power * factor >= about_us * 0.999))


def _tick_name(us: float, step_us: float) -> str:
    unit, name = (1e6, "s") if step_us >= 1e5 else (1e3, "ms") if step_us >= 1e2 else (1.0, "us")
    digits = max(0, ceil(-log10(step_us / unit) - 1e-9))
    return f"{us / unit:.{digits}f} {name}" if us else "0"


def _memory(program: PlannedProgram, end_us: float, top: int) -> tuple[str, str]:
    """Stacked areas, one for each category, and what is written beside them."""
    steps = memory_steps(program)
    peak_bytes = program.simulation.peak_bytes
    budget_bytes = program.budget_bytes
    most = max(peak_bytes, 1)
    if budget_bytes is not None and budget_bytes < 1.5 * most:
        most = max(most, budget_bytes)
    scale = MEMORY / (1.04 * most)
    bottom = top + MEMORY
    ends = [*(start for start, _ in steps[1:]), end_us]
    areas, below = [], [0] * len(steps)
    for name, words in CATEGORIES.items():
        above = [height + getattr(live, name) for height, (_, live) in zip(below, steps, strict=True)]
        if above == below:
            continue
        outline = _outline(steps, ends, above, bottom, scale) + _outline(steps, ends, below, bottom, scale, back=True)
        largest = format_bytes(max(getattr(live, name) for _, live in steps))
        areas.append(
            f'<path class="memory {name.removesuffix("_bytes")}" d="M{outline[1:]}Z">'
            f"<title>memory: {words}\nat most {largest}</title></path>"
        )
        below = above
    notes = [f'<text class="lane" x="{LEFT - 10}" y="{bottom - MEMORY / 2:g}">memory</text>']
    notes.append(f'<text class="lane quiet" x="{LEFT - 10}" y="{bottom - MEMORY / 2 + 15:g}">peak')
    notes[-1] += f" {format_bytes(peak_bytes)}</text>"
    if budget_bytes is not None and budget_bytes <= most:
        y = bottom - budget_bytes * scale
        notes.append(f'<line class="budget" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        notes.append(f'<text class="budget" x="{RIGHT - 4}" y="{y - 4:.1f}">budget {format_bytes(budget_bytes)}</text>')
    return "".join(areas), "".join(notes)


def _outline(
    steps: Sequence[tuple[float, object]],
    ends: Sequence[float],
    heights: Sequence[int],
    bottom: int,
    scale: float,
    back: bool = False,
) -> str:
    corners = [
        (x, bottom - height * scale)
        for (start, _), end, height in zip(steps, ends, heights, strict=True)
        for x in (start, end)
    ]
    return "".join(f"L{x:.1f},{y:.1f}" for x, y in (reversed(corners) if back else corners))


def _legend() -> str:
    """Two rows: of the bars, of the memory."""
    memory = {f"memory {name.removesuffix('_bytes')}": words for name, words in CATEGORIES.items()}
    parts = [f'<text class="quiet" x="16" y="{y + 10}">{row}</text>' for row, y in (("time", 40), ("memory", 62))]
    for y, keys in ((40, dict(KINDS.items())), (62, memory)):
        x = 70.0
        for name, words in keys.items():
            parts.append(f'<path class="{name}" d="M{x:g},{y}h12v12h-12Z"/>')
            parts.append(f'<text class="quiet" x="{x + 17:g}" y="{y + 10}">{words}</text>')
            x += 17 + LETTER * len(words) + 16
    return "".join(parts)
