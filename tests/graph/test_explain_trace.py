"""A planned program as a trace: events that a viewer can place."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphshard.explain import PlannedProgram
from tests.graph.planned_programs import deep_program, explanation, planned, random_problem, small_program


def events(*programs: PlannedProgram) -> list[dict[str, Any]]:
    return json.loads(explanation(*programs).to_chrome_trace())["traceEvents"]


def threads(found: list[dict[str, Any]]) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Slices by process and name of their thread."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in found if e["name"] == "thread_name"}
    by_thread = defaultdict(list)
    for event in found:
        if event["ph"] == "X":
            by_thread[event["pid"], names[event["pid"], event["tid"]]].append(event)
    return by_thread


@settings(max_examples=50)
@given(st.integers(0, 2**32))
def test_trace_slices_of_a_thread_follow_one_another(seed: int) -> None:
    for slices in threads(events(planned(random_problem(seed)))).values():
        for one, other in pairwise(slices):
            assert round(one["ts"] + one["dur"], 3) <= other["ts"]
        assert min(event["dur"] for event in slices) >= 0.0


def test_trace_has_a_process_per_program_and_a_thread_per_group() -> None:
    found = events(small_program(), deep_program(3, title="region 1 backward"))
    processes = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert processes == {1: "region 0 backward (plan: fsdp2)", 2: "region 1 backward (plan: fsdp2)"}
    assert [name for pid, name in threads(found) if pid == 1] == ["computation", "group shard", "group replicate"]


def test_trace_says_what_a_collective_carries_and_why_it_is_waited_for() -> None:
    program = small_program()
    by_thread = threads(events(program))
    first, *_ = by_thread[1, "group shard"]
    assert first["name"] == "gather:0"
    assert first["args"]["fqns"] == "layers.1.wq, layers.1.wo"
    assert first["args"]["bytes"] == program.buckets[0].wire_bytes
    assert first["args"]["reason"] == "head"
    assert first["args"]["exposed_us"] == pytest.approx(program.simulation.exposures[0].exposed_us, abs=1e-3)
    names = [event["name"] for event in by_thread[1, "group replicate"]]
    assert names == ["all_reduce_tp", "reduce:2 (all-reduce)", "reduce:3 (all-reduce)"]


def test_trace_waits_add_up_to_what_is_exposed() -> None:
    program = small_program()
    slices = threads(events(program))[1, "computation"]
    waited = sum(event["dur"] for event in slices if event["name"].startswith("wait for "))
    assert waited == pytest.approx(program.simulation.exposed_us, abs=0.01)
    assert "wait for all_reduce_tp" in {event["name"] for event in slices}


def test_trace_counts_memory_up_to_its_peak() -> None:
    counters = [event for event in events(small_program()) if event["ph"] == "C"]
    assert max(sum(event["args"].values()) for event in counters) == small_program().simulation.peak_bytes


def test_trace_shows_measured_waits_below_predicted_ones() -> None:
    # The second one's median begins before the first one's ends, the third never waits.
    measured = {
        "gather:0": (3.0, 260.0, 250.0),
        "all_reduce_tp": (200.0, 300.0, 50.0),
        "reduce:2": (100.0, 400.0, 0.0),
    }
    slices = threads(events(small_program(measured=measured)))[1, "measured waits"]
    assert [(event["ts"], event["dur"]) for event in slices] == [(10.0, 250.0), (260.0, 40.0)]
    assert [event["args"]["waited_us"] for event in slices] == [250.0, 50.0]
