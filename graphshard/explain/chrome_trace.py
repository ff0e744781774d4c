"""A plan as a trace that Perfetto (ui.perfetto.dev) and Chrome's tracing page open.

Source: the "Trace Event Format" of the Chromium project: complete events (X), counters (C) and metadata (M).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from graphshard.explain.contents import CATEGORIES
from graphshard.explain.lanes import KINDS, lanes_of
from graphshard.explain.memory_steps import memory_steps
from graphshard.explain.program import PlannedProgram


def chrome_trace(programs: Sequence[PlannedProgram], hardware: str, notes: Sequence[str]) -> str:
    """One process for each program, one thread for its computation and one for each process group; times in us."""
    events = [event for pid, program in enumerate(programs, 1) for event in _events(program, pid)]
    trace = {
        "displayTimeUnit": "ms",
        "otherData": {"hardware": hardware, "notes": list(notes)},
        "traceEvents": events,
    }
    return json.dumps(trace, separators=(",", ":"), allow_nan=False) + "\n"


def _events(program: PlannedProgram, pid: int) -> Iterator[dict[str, Any]]:
    yield _named("process_name", pid, 0, f"{program.title} (plan: {program.plan})")
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for tid, lane in enumerate(lanes_of(program)):
        yield _named("thread_name", pid, tid, lane.name)
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
        for bar in lane.bars:
            start_us, end_us = round(bar.start_us, 3), round(bar.end_us, 3)
            yield {
                "ph": "X",
                "name": bar.name,
                "cat": KINDS[bar.kind],
                "pid": pid,
                "tid": tid,
                "ts": start_us,
                # Of rounded ends: neighbours touch, and never overlap.
                "dur": round(end_us - start_us, 3),
                "args": dict(bar.facts),
            }
    for start_us, live in memory_steps(program):
        sizes = {CATEGORIES[name]: size for name, size in live._asdict().items()}
        yield {"ph": "C", "name": "memory, bytes", "pid": pid, "tid": 0, "ts": round(start_us, 3), "args": sizes}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
