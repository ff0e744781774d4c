"""An explanation as JSON: the numbers behind the text, for programs and for `diff`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from graphshard.explain.contents import at_peak, busy_us, time_parts
from graphshard.explain.program import BucketRow, PlannedProgram
from graphshard.explain.waits import waits_of

FORMAT, VERSION = "graphshard explanation", 1


def facts_json(programs: Sequence[PlannedProgram], hardware: str, notes: Sequence[str]) -> str:
    """Sorted keys, times in us rounded to a nanosecond: equal plans give equal text, on every rank."""
    facts = {
        "format": FORMAT,
        "version": VERSION,
        "hardware": hardware,
        "notes": list(notes),
        "programs": [_program(program) for program in programs],
    }
    return json.dumps(facts, sort_keys=True, indent=1, allow_nan=False) + "\n"


def _program(program: PlannedProgram) -> dict[str, Any]:
    simulation = program.simulation
    return {
        "title": program.title,
        "plan": program.plan,
        "direction": program.problem.direction,
        "step_us": _us(simulation.step_us),
        "lower_bound_us": _us(program.lower_bound_us),
        "exposed_us": _us(simulation.exposed_us),
        "parts_us": {name: _us(us) for name, us in time_parts(program)},
        "busy_us": {program.problem.streams[stream]: _us(us) for stream, us in sorted(busy_us(program).items())},
        "peak_bytes": simulation.peak_bytes,
        "peak_at": program.op_name(simulation.live_bytes.index(simulation.peak_bytes)),
        "peak_parts_bytes": {name.removesuffix("_bytes"): size for name, size in at_peak(program)._asdict().items()},
        "budget_bytes": program.budget_bytes,
        "waits": [
            {
                "name": wait.name,
                "collective": wait.kind,
                "exposed_us": _us(wait.exposed_us),
                "reason": wait.reason,
                "cause": wait.cause,
                "why": wait.why,
            }
            for wait in waits_of(program)
        ],
        "buckets": [_bucket(program, row) for row in program.buckets],
        "baselines": [{"name": name, "step_us": _us(us), "peak_bytes": size} for name, us, size in program.baselines],
    }


def _bucket(program: PlannedProgram, row: BucketRow) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": row.name,
        "collective": row.kind,
        "fqns": list(row.fqns),
        "wire_bytes": row.wire_bytes,
        "launched_before": program.op_name(row.launch_at),
        "awaited_before": program.awaited_before(row),
        "start_us": _us(row.start_us),
        "end_us": _us(row.end_us),
        "exposed_us": _us(row.exposed_us),
    }
    if row.measured is not None:
        names = ("launched_us", "done_us", "waited_us")
        found["measured"] = {name: _us(us) for name, us in zip(names, row.measured, strict=True)}
    return found


def _us(us: float) -> float:
    return round(us, 3)
