"""What an explanation says, before it has a form: figures and tables of words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphshard.explain.program import BucketRow, PlannedProgram
from graphshard.explain.quantities import format_bytes, format_fqns, format_ratio, format_share, format_us
from graphshard.explain.waits import waits_of
from graphshard.planner import LiveBytes


@dataclass(frozen=True)
class Figure:
    """One number that stands out, and what it means."""

    name: str
    value: str
    remark: str


@dataclass(frozen=True)
class Table:
    """Rows of words.

    Attributes:
        title: what it shows.
        columns: names; those that begin with ``>`` hold numbers, aligned to the right.
        rows: as many cells as there are columns.
        buckets: the bucket of each row, -1 for none; empty where rows are no buckets.
        note: below it.
        prose: the last column holds sentences.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    buckets: tuple[int, ...] = ()
    note: str = ""
    prose: bool = False


@dataclass(frozen=True)
class Section:
    """One program; `verdict`: in one sentence."""

    title: str
    verdict: str
    figures: tuple[Figure, ...]
    tables: tuple[Table, ...]


CATEGORIES = {
    "computation_bytes": "computation",
    "parameter_bytes": "gathered parameters",
    "gradient_bytes": "unreduced gradients",
    "reduced_bytes": "reduced gradients (shards)",
    "buffer_bytes": "collective buffers",
}
_BASELINES = {
    "fsdp2": "FSDP2's own: one bucket per unit, gathered one unit ahead",
    "per_parameter": "one collective per parameter, none ahead of its use",
    "fixed_size": "buckets of a fixed size, gathered one bucket ahead",
}


def overview(programs: Sequence[PlannedProgram]) -> Table:
    """One row for each program."""
    rows = []
    for program in programs:
        step_us, exposed_us = program.simulation.step_us, program.simulation.exposed_us
        rows.append(
            (
                program.title,
                program.plan,
                format_us(step_us),
                format_us(program.lower_bound_us),
                format_ratio(step_us, program.lower_bound_us),
                format_us(exposed_us),
                format_bytes(program.simulation.peak_bytes),
                str(len(program.buckets)),
            )
        )
    columns = ("program", "plan", ">predicted", ">lower bound", ">ratio", ">exposed", ">peak", ">buckets")
    return Table("Programs", columns, tuple(rows))


def section(program: PlannedProgram, top: int | None = None) -> Section:
    """What is said about one program; of the waits, only the `top` longest."""
    tables = [_time_parts(program), _waits(program, top), _memory(program), _baselines(program)]
    tables += [_measured(program), bucket_table(program)]
    title = f"{program.title} (plan: {program.plan})"
    return Section(title, verdict(program), figures(program), tuple(table for table in tables if table.rows))


def verdict(program: PlannedProgram) -> str:
    """What limits the program."""
    busy = busy_us(program)
    compute = f"Its computation takes {format_us(program.problem.compute_us)}"
    if not busy:
        return f"{compute}; it has no collectives."
    stream = max(busy, key=lambda stream: busy[stream])
    sent = f"its collectives {format_us(busy[stream])}"
    if len(busy) > 1:
        sent += f" on {program.stream_name(stream)}, the busiest"
    if busy[stream] > program.problem.compute_us:
        return f"{compute}, {sent}. Communication limits it: the computation is too short to hide it all."
    return f"{compute}, {sent}. Computation limits it, and can hide what is sent neither first nor last."


def figures(program: PlannedProgram) -> tuple[Figure, ...]:
    """The numbers at the top of a program."""
    simulation, step_us = program.simulation, program.simulation.step_us
    waited = sum(1 for exposure in simulation.exposures if exposure.exposed_us > 0.0)
    bound = f"{format_ratio(step_us, program.lower_bound_us)} the lower bound"
    share = format_share(simulation.exposed_us, step_us)
    exposed = f"{share} of the step: the computation stands still for {waited} of {len(simulation.exposures)} waits"
    budget = "no budget given"
    if program.budget_bytes is not None:
        over = "within" if simulation.peak_bytes <= program.budget_bytes else "OVER"
        budget = f"{over} the budget of {format_bytes(program.budget_bytes)}"
    peak_at = simulation.live_bytes.index(simulation.peak_bytes)
    where = f"{'before' if peak_at == len(program.problem.ops) else 'at'} {program.op_name(peak_at)}"
    found = [
        Figure("predicted step", format_us(step_us), bound),
        Figure("lower bound", format_us(program.lower_bound_us), "no schedule of this program is faster"),
        Figure("exposed", format_us(simulation.exposed_us), exposed),
        Figure("peak memory", format_bytes(simulation.peak_bytes), f"{where}; {budget}"),
    ]
    busy = busy_us(program)
    if busy:
        stream = max(busy, key=lambda stream: busy[stream])
        name = program.stream_name(stream) if len(program.problem.streams) > 1 else "collectives"
        busiest = f"{format_share(busy[stream], step_us)} of the step is a collective under way"
        found.insert(3, Figure(f"{name} busy", format_us(busy[stream]), busiest))
    measured = [(row.exposed_us, row.measured[2]) for row in program.buckets if row.measured is not None]
    if measured:
        predicted_us, measured_us = (sum(column) for column in zip(*measured, strict=True))
        remark = f"predicted {format_us(predicted_us)} for the same {len(measured)} buckets"
        found.append(Figure("measured waits", format_us(measured_us), remark))
    return tuple(found)


def busy_us(program: PlannedProgram) -> dict[int, float]:
    """How long each stream of collectives is busy."""
    found: dict[int, float] = {}
    for event in program.simulation.events:
        if event.what == "collective":
            found[event.stream] = found.get(event.stream, 0.0) + event.end_us - event.start_us
    return found


def time_parts(program: PlannedProgram) -> tuple[tuple[str, float], ...]:
    """Parts of the step, in us; they add up to it."""
    spent = {"compute": 0.0, "copy_in": 0.0, "copy_out": 0.0, "exposed": 0.0}
    for event in program.simulation.events:
        if event.stream < 0:
            spent[event.what] += event.end_us - event.start_us
    compute_us = program.problem.compute_us
    return (
        ("computation", compute_us),
        ("computation, slower beside collectives", max(0.0, spent["compute"] - compute_us)),
        ("copies into buckets, and launches", spent["copy_in"]),
        ("copies out of buckets", spent["copy_out"]),
        ("waiting for collectives (exposed)", spent["exposed"]),
        ("collectives that nothing waits for, at the end", max(0.0, program.simulation.step_us - sum(spent.values()))),
    )


def _time_parts(program: PlannedProgram) -> Table:
    step_us = program.simulation.step_us
    # A part that rounds to nothing is none.
    parts = [(name, us) for name, us in time_parts(program) if us > 1e-6 * step_us]
    rows = tuple((name, format_us(us), format_share(us, step_us)) for name, us in parts)
    return Table("Where the time goes", ("part", ">time", ">share"), rows)


def _waits(program: PlannedProgram, top: int | None) -> Table:
    waits = waits_of(program)
    shown = waits if top is None else waits[:top]
    rows = tuple((format_us(wait.exposed_us), wait.name, wait.cause, wait.why) for wait in shown)
    note = ""
    if len(shown) < len(waits):
        rest_us = sum(wait.exposed_us for wait in waits[len(shown) :])
        note = f"{len(waits) - len(shown)} more, {format_us(rest_us)} together"
    columns = (">exposed", "collective", "cause", "why it is not hidden")
    return Table("What the computation waits for", columns, rows, tuple(wait.bucket for wait in shown), note, True)


def at_peak(program: PlannedProgram) -> LiveBytes:
    """What is allocated where the most is."""
    return max(program.live, key=sum)


def _memory(program: PlannedProgram) -> Table:
    peak = at_peak(program)
    sizes = sorted(peak._asdict().items(), key=lambda item: -item[1])
    rows = tuple((CATEGORIES[name], format_bytes(size), format_share(size, sum(peak))) for name, size in sizes if size)
    return Table("Memory at its peak", ("held by", ">size", ">share"), rows)


def _baselines(program: PlannedProgram) -> Table:
    if not program.baselines:
        return Table("Other schedules", (), ())
    mine = ("this plan", program.simulation.step_us, program.simulation.peak_bytes)
    rows = []
    for name, us, peak_bytes in sorted(
        [mine, *program.baselines], key=lambda baseline: (baseline[1], baseline != mine, baseline[0])
    ):
        remark = _BASELINES.get(name, "")
        if program.budget_bytes is not None and peak_bytes > program.budget_bytes:
            remark = f"{remark}; over the budget" if remark else "over the budget"
        ratio = format_ratio(us, program.simulation.step_us)
        rows.append((name, format_us(us), ratio, format_bytes(peak_bytes), remark))
    columns = ("schedule", ">predicted", ">vs this plan", ">peak", "what it is")
    return Table("Other schedules", columns, tuple(rows), prose=True)


def _measured(program: PlannedProgram) -> Table:
    rows, buckets = [], []
    for row in program.buckets:
        if row.measured is not None:
            predicted = (row.start_us, row.end_us, row.exposed_us)
            rows.append((row.name, *(format_us(us) for us in (*predicted, *row.measured))))
            buckets.append(row.index)
    columns = ("bucket", ">start", ">end", ">exposed", ">measured launch", ">measured done", ">measured wait")
    note = "A predicted end is that of the collective; a measured one is done, at the latest, when its wait is over."
    return Table("Predicted beside measured", columns, tuple(rows), tuple(buckets), note)


def bucket_table(program: PlannedProgram) -> Table:
    """One row for each bucket, in order of launch."""
    columns = ["bucket", "kind", ">params", "first and last", ">size", "launched before", "awaited before"]
    columns += [">start", ">end", ">exposed"]
    rows = tuple(_bucket_cells(program, row) for row in program.buckets)
    return Table("Buckets, in order of launch", tuple(columns), rows, tuple(row.index for row in program.buckets))


def _bucket_cells(program: PlannedProgram, row: BucketRow) -> tuple[str, ...]:
    cells = [row.name, row.kind, str(len(row.fqns)), format_fqns(row.fqns), format_bytes(row.wire_bytes)]
    cells += [program.op_name(row.launch_at), program.awaited_before(row)]
    cells += [format_us(row.start_us), format_us(row.end_us), format_us(row.exposed_us) if row.exposed_us else "-"]
    return tuple(cells)
