"""`bench.schedule`: options, rows, cases, and how another's schedule is read off its graph."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from bench.schedule import __main__ as schedule
from bench.schedule import torch_overlap
from bench.schedule.cases import MODELS, Case, CaseModel, TracedModel, make_case, trace_model
from bench.schedule.deep_graph import deepened
from bench.schedule.rows import OURS, SYSTEMS, TORCH, ScheduleRow, case_rows, schedule_table, summary, summary_lines
from bench.schedule.scheduled_graph import Unreadable
from graphshard.compat.inductor import copy_graph
from graphshard.cost import CostModel, find_hardware
from graphshard.cost.topology import group_shape
from graphshard.graph.ir import ALL_GATHER
from graphshard.graph.liveness import allocations_of
from graphshard.planner import Bucket, Schedule, check_schedule, per_parameter_schedule, simulate
from graphshard.planning.extraction import extract_problem
from graphshard.scale.decoder import DecoderSize
from graphshard.scale.presets import decoder
from graphshard.scale.repeat import NotRepeated, coarsened
from graphshard.scale.resize import program_on
from graphshard.scale.trace import TracedProgram

H100 = find_hardware("h100")
ROW_KEYS = [
    *("case", "direction", "system", "time_us", "lower_bound_us", "exposed_us", "peak_bytes", "budget_bytes"),
    "reason",
]
DEEP = CaseModel(decoder("deep", DecoderSize(64, 7, 2, 1, 96, 64), 16), "none")
TWO = CaseModel(decoder("two", DecoderSize(32, 2, 2, 1, 64, 64), 16), "none")


@pytest.fixture(scope="module")
def traced() -> TracedModel:
    return trace_model(DEEP, H100)


@pytest.fixture(scope="module")
def case(traced: TracedModel) -> Case:
    return make_case(traced, 16)


def row(system: str, time_us: float | None, peak_bytes: int = 1, **changes: Any) -> ScheduleRow:
    made = ScheduleRow("demo/w8/80gb", "forward", system, time_us, 10.0, 1.0, peak_bytes, 2)
    return replace(made, **changes)


# -- options and rows


def test_options_name_what_is_impossible(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for argv, message in {
        ("--worlds", "1"): "--worlds: got 1, want at least 2",
        ("--budget", "0"): "--budget: got 0.0, want GB, above 0",
        ("--hardware", "abacus"): "--hardware",
        ("--json", str(tmp_path / "none" / "x.json")): "want a file in a folder that is there",
    }.items():
        with pytest.raises(SystemExit):
            schedule.parse_options(argv)
        assert message in capsys.readouterr().err


def test_options_default_to_the_whole_grid() -> None:
    options = schedule.parse_options([])
    assert [model.name for model in options.models] == [*MODELS]
    assert options.worlds == (8, 64, 512)
    assert options.systems == SYSTEMS


def test_row_has_the_agreed_keys_in_order() -> None:
    assert [field.name for field in fields(ScheduleRow)] == ROW_KEYS


def test_summary_counts_faster_peers_that_fit() -> None:
    found = summary([row(OURS, 12.0), row("fsdp2", 11.0), row("fixed_500mb", 10.5, peak_bytes=3), row(TORCH, None)])
    assert found is not None
    assert [peer.system for _, peer in found.beaten] == ["fsdp2"]
    assert found.worst_ratio == 1.2


def test_summary_counts_a_peer_that_fits_where_graphshard_finds_nothing() -> None:
    elsewhere = row(OURS, 10.0, case="demo/w64/80gb")
    found = summary([row(OURS, None, reason="too small"), row("fsdp2", 11.0), elsewhere])
    assert found is not None
    assert len(found.beaten) == 1
    assert any("graphshard above a peer that fits the budget: 1 of 1" in line for line in summary_lines(
        [row(OURS, None), row("fsdp2", 11.0), elsewhere]
    ))  # fmt: skip


def test_summary_forgives_rounding_alone() -> None:
    found = summary([row(OURS, 12.0), row("fsdp2", 12.0 * (1 - 1e-12))])
    assert found is not None
    assert not found.beaten


def test_table_says_why_a_schedule_is_missing_and_which_is_over() -> None:
    lines = schedule_table([row(TORCH, None, reason="KeyError: x"), row("fsdp2", 11.0, peak_bytes=3)])
    assert lines[1].endswith("KeyError: x")
    assert lines[2].endswith("over")


# -- cases


def test_grid_of_a_two_layer_decoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(schedule, "QUICK", TWO)
    file = tmp_path / "rows.json"
    systems = [system for system in SYSTEMS if system != TORCH]
    assert schedule.main(["--quick", "--worlds", "8", "64", "--systems", *systems, "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    assert list(written) == ["versions", "machine", "rows"]
    rows = written["rows"]
    assert {tuple(entry) for entry in rows} == {tuple(ROW_KEYS)}
    assert [entry["case"] for entry in rows[:: len(systems)]] == [
        f"two/w{world}/{budget}" for world in (8, 64) for _ in range(2) for budget in ("fsdp2", "80gb")
    ]
    assert len(rows) == 2 * 2 * 2 * len(systems)
    for entry in rows:
        assert entry["time_us"] >= entry["lower_bound_us"] > 0.0
        assert entry["system"] != OURS or entry["peak_bytes"] <= entry["budget_bytes"]
    assert "graphshard above a peer that fits the budget: 0 of" in capsys.readouterr().out


def test_budget_without_room_for_the_states_is_a_row_with_its_reason(case: Case) -> None:
    budgets = schedule.budgets_of(case, case.states_bytes / 1e9)
    assert list(budgets.values())[1] <= 0
    rows = case_rows(case, {"none": 0}, [OURS, "fsdp2"])
    assert [(found.time_us is None, bool(found.reason)) for found in rows] == [(True, True), (False, False)] * 2


@pytest.mark.parametrize("direction", range(2), ids=["forward", "backward"])
def test_deep_graph_is_the_problem_that_is_planned(case: Case, direction: int) -> None:
    planned = case.programs[direction]
    graph, ctx = program_on(case.deep_program(planned), case.layout)
    found, want = coarsened(extract_problem(graph, ctx, planned.scene)), planned.problem
    assert [g.fqn for g in found.gathers] == [g.fqn for g in want.gathers]
    assert [r.fqn for r in found.reductions] == [r.fqn for r in want.reductions]
    assert {g.unit for g in found.gathers} >= {f"layers.{i}" for i in range(7)}
    assert found.compute_us == pytest.approx(want.compute_us)
    assert max(found.op_bytes) == max(want.op_bytes)
    per_parameter = [simulate(problem, per_parameter_schedule(problem)) for problem in (found, want)]
    assert per_parameter[0].peak_bytes == per_parameter[1].peak_bytes
    assert per_parameter[0].step_us == pytest.approx(per_parameter[1].step_us)


def test_deep_graph_refuses_blocks_that_differ(traced: TracedModel) -> None:
    program, repetition = traced.traced.forward, traced.repetition
    graph = copy_graph(program.gm)
    products = [node for node in graph.nodes if node.target is torch.ops.aten.mul.Tensor]
    products[len(products) // 2].target = torch.ops.aten.add.Tensor
    other = TracedProgram(program.direction, GraphModule(program.gm, graph), program.params, program.stays)
    with pytest.raises(NotRepeated, match="differ"):
        deepened(other, repetition.units, 7)
    with pytest.raises(NotRepeated, match="at least 4 blocks"):
        deepened(program, repetition.units[:3], 7)


# -- the peer


def read(case: Case, direction: int) -> torch_overlap.Overlapped:
    planned = case.programs[direction]
    graph, ctx = program_on(case.deep_program(planned), case.layout)
    return torch_overlap.overlapped(graph, ctx, planned.scene)


def steps_of(found: Schedule) -> list[tuple[int, str, Bucket]]:
    """What happens before which operation; the order of what happens before the same one is left open."""
    steps = [(step.before, step.kind, found.buckets[step.bucket]) for step in found.steps]
    return sorted(steps, key=str)


@pytest.mark.parametrize("direction", range(2), ids=["forward", "backward"])
def test_reading_an_untouched_graph_yields_one_collective_per_parameter(
    case: Case, direction: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_overlap, "_pass", lambda: lambda gm, **options: gm)
    found = read(case, direction)
    want = per_parameter_schedule(found.problem)
    assert steps_of(found.schedule) == steps_of(want)
    assert simulate(found.problem, found.schedule).step_us == pytest.approx(simulate(found.problem, want).step_us)
    assert found.problem.compute_us == pytest.approx(case.programs[direction].problem.compute_us)


def test_reading_notices_a_dropped_operation(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def drop(gm: GraphModule, **options: Any) -> None:
        node = next(node for node in gm.graph.nodes if node.target is torch.ops.aten.mm.default)
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)

    monkeypatch.setattr(torch_overlap, "_pass", lambda: drop)
    with pytest.raises(Unreadable, match="lacks 1 operations"):
        read(case, 0)


def test_pass_sees_our_costs_and_memory_of_a_gpu(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def look(gm: GraphModule, **options: Any) -> None:
        seen.update(gm=gm, **options)

    monkeypatch.setattr(torch_overlap, "_pass", lambda: look)
    read(case, 0)
    graph, estimate = seen["gm"].graph, seen["custom_runtime_estimation"]
    cost, planned = case.programs[0].scene.cost, case.programs[0]
    compute_us = sum(1e3 * estimate(node, None) for node in graph.nodes if not is_added(node))
    assert compute_us == pytest.approx(planned.problem.compute_us)
    launch = next(node for node in graph.nodes if node.target is ALL_GATHER)
    want_us = cost.collective_us("all_gather", launch.meta["val"].nbytes, planned.scene.group_shape("shards"))
    assert 1e3 * estimate(launch, None) == pytest.approx(want_us)
    values = {node: node.meta["val"] for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)}
    assert {value.device.type for value in values.values()} == {"cuda"}
    memory: dict[Any, set[Any]] = {}
    inside = allocations_of(graph)
    for node, value in values.items():
        memory.setdefault(value.untyped_storage(), set()).update(inside[node])
    assert {len(found) for found in memory.values()} == {1}


def is_added(node: Node) -> bool:
    """Whether graphshard's lowering added a node: all of these say of which bucket they are."""
    return "bucket_of" in node.meta


def test_failure_of_the_pass_is_a_row_with_its_reason(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(gm: GraphModule, **options: Any) -> None:
        raise KeyError("wait_tensor_7")

    monkeypatch.setattr(torch_overlap, "_pass", lambda: fail)
    monkeypatch.setattr(torch_overlap, "refusal", lambda: None)
    rows = case_rows(case, {"80gb": 80 * 10**9}, [TORCH])
    assert [found.time_us for found in rows] == [None, None]
    assert all("KeyError: 'wait_tensor_7'" in found.reason for found in rows)
    assert not any(asdict(found)["peak_bytes"] for found in rows)


@pytest.mark.parametrize("direction", range(2), ids=["forward", "backward"])
def test_torchs_pass_is_read_as_a_schedule(case: Case, direction: int) -> None:
    if (reason := torch_overlap.refusal()) is not None:
        pytest.skip(reason)
    found = read(case, direction)
    check_schedule(found.problem, found.schedule)
    problem = case.programs[direction].problem
    assert len(found.schedule.buckets) < len(problem.gathers) + len(problem.reductions)
    assert found.problem.compute_us == pytest.approx(problem.compute_us)
    assert simulate(found.problem, found.schedule).step_us < simulate(problem, per_parameter_schedule(problem)).step_us


def test_buckets_are_as_large_as_their_bandwidth_wants() -> None:
    cost = CostModel(H100)
    near, far = (torch_overlap.saturating_mb(cost, group_shape(range(ranks), 8)) for ranks in (8, 512))
    assert 10.0 <= near < far == 500.0
    shape = group_shape(range(8), 8)
    num_bytes = int(near * 2**20)
    share = num_bytes * cost.us_per_byte("all_gather", shape) / cost.collective_us("all_gather", num_bytes, shape)
    assert share == pytest.approx(0.9, abs=0.02)
