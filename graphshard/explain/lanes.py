"""The timeline of a program as lanes of bars: what each drawing of it shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from graphshard.explain.program import PlannedProgram
from graphshard.explain.quantities import format_bytes, format_fqns, format_us
from graphshard.explain.waits import ALL_REDUCE, Wait, collectives_in_order, waits_of
from graphshard.planner import Event

Kind = Literal["compute", "copy", "wait", "gather", "reduce", "own"]
KINDS: dict[Kind, str] = {
    "compute": "computation",
    "copy": "copy into or out of a bucket",
    "wait": "waiting (exposed)",
    "gather": "all-gather",
    "reduce": "reduction of gradients",
    "own": "the model's own collective",
}


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        kind: says its colour.
        name: what is written on it.
        start_us, end_us: from the program's start.
        bucket: index, -1 for none.
        facts: (name, value) pairs, more about it.
    """

    kind: Kind
    name: str
    start_us: float
    end_us: float
    bucket: int = -1
    facts: tuple[tuple[str, str | int | float], ...] = ()


@dataclass(frozen=True)
class Lane:
    """Bars that follow one another; `measured`: of real runs, not of the simulation."""

    name: str
    bars: tuple[Bar, ...]
    measured: bool = False


def lanes_of(program: PlannedProgram) -> tuple[Lane, ...]:
    """The computation, then the waits that were measured, if any were, then each process group."""
    lanes = [Lane("computation", tuple(_computation(program)))]
    measured = tuple(_measured(program))
    if measured:
        lanes.append(Lane("measured waits", measured, measured=True))
    by_stream: dict[int, list[Bar]] = {stream: [] for stream in range(len(program.problem.streams))}
    sent: set[int] = set()
    waits: dict[int, list[Wait]] = {}
    for wait in waits_of(program):
        waits.setdefault(wait.bucket, []).append(wait)
    for event, name in collectives_in_order(program):
        follows = event.bucket >= 0 and event.bucket in sent
        sent.add(event.bucket)
        by_stream[event.stream].append(_collective(program, event, name, waits, follows))
    for stream, bars in by_stream.items():
        lanes.append(Lane(program.stream_name(stream), tuple(bars)))
    return tuple(lanes)


def _computation(program: PlannedProgram) -> Iterator[Bar]:
    own_waits = iter(
        program.problem.own[exposure.bucket].name
        for exposure in program.simulation.exposures
        if exposure.reason == "own"
    )
    for event in program.simulation.events:
        if event.stream >= 0:
            continue
        if event.what == "compute":
            yield Bar("compute", program.op_name(event.position), event.start_us, event.end_us)
            continue
        before = (("before", program.op_name(event.position)),)
        name = program.bucket_names[event.bucket] if event.bucket >= 0 else next(own_waits)
        if event.what == "exposed":
            yield Bar("wait", f"wait for {name}", event.start_us, event.end_us, event.bucket, before)
        else:
            what = "copy into" if event.what == "copy_in" else "copy out of"
            yield Bar("copy", f"{what} {name}", event.start_us, event.end_us, event.bucket, before)


def _collective(program: PlannedProgram, event: Event, name: str, waits: dict[int, list[Wait]], follows: bool) -> Bar:
    if event.bucket < 0:
        launched = (("launched before", program.op_name(event.position)),)
        return Bar("own", name, event.start_us, event.end_us, -1, (*launched, *_waited(waits.get(-1, ()), name)))
    row = program.buckets[event.bucket]
    kind: Kind = "gather" if program.schedule.buckets[event.bucket].kind == "gather" else "reduce"
    num_bytes, collective = row.wire_bytes, row.kind.split(" + ")[0]
    if follows:
        members = program.schedule.members(program.problem, row.index)
        num_bytes, collective = sum(member.shard_bytes for member in members), "all-reduce"
        name += ALL_REDUCE
    facts: list[tuple[str, str | int | float]] = [
        ("collective", collective),
        ("parameters", len(row.fqns)),
        ("fqns", ", ".join(row.fqns)),
        ("bytes", num_bytes),
        ("launched before", program.op_name(row.launch_at)),
        ("awaited before", program.awaited_before(row)),
    ]
    facts += _waited(waits.get(event.bucket, ()), name)
    return Bar(kind, name, event.start_us, event.end_us, event.bucket, tuple(facts))


def _waited(waits: Sequence[Wait], name: str) -> list[tuple[str, str | int | float]]:
    for wait in waits:
        if wait.name == name:
            return [("exposed_us", round(wait.exposed_us, 3)), ("reason", wait.reason), ("why", wait.why)]
    return [("exposed_us", 0.0), ("reason", "hidden")]


def _measured(program: PlannedProgram) -> Iterator[Bar]:
    """The waits of real runs; medians of several runs may overlap a little, and are cut."""
    index_of = {name: index for index, name in enumerate(program.bucket_names)}
    free_us = 0.0
    for name, timing in sorted((program.measured or {}).items(), key=lambda item: (item[1][1], item[0])):
        launched_us, done_us, waited_us = timing
        start_us = max(done_us - waited_us, free_us)
        if done_us > start_us:
            facts = (("launched_us", launched_us), ("waited_us", waited_us))
            yield Bar("wait", f"wait for {name}, measured", start_us, done_us, index_of.get(name, -1), facts)
            free_us = done_us


def described(bar: Bar) -> str:
    """A bar in a few lines, for a tooltip."""
    lines = [bar.name, f"{format_us(bar.start_us)} to {format_us(bar.end_us)} ({format_us(bar.end_us - bar.start_us)})"]
    for name, value in bar.facts:
        if name == "exposed_us" and not value:
            lines.append("hidden: the computation never waits for it")
        elif name == "bytes":
            lines.append(format_bytes(int(value)))
        elif name.endswith("_us"):
            lines.append(f"{name.removesuffix('_us')}: {format_us(float(value))}")
        elif name == "parameters":
            lines.append(f"{value} parameter{'s' if value != 1 else ''}")
        elif name == "fqns":
            lines.append(format_fqns(str(value).split(", ")))
        elif name in ("why", "collective"):
            lines.append(str(value).replace("`", ""))
        elif name != "reason":
            lines.append(f"{name} {value}")
    return "\n".join(lines)
