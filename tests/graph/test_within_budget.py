"""A program's budget counts on the final graph: what it allocates there is planned again, or said."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule

from graphshard.cost import HARDWARE, CostModel, GroupShape
from graphshard.graph.ir import aten, output_node
from graphshard.graph.liveness import peak_bytes
from graphshard.graph.plan import Decision
from graphshard.lowering.driver import after_lowering
from graphshard.lowering.within_budget import lower_within_budget
from graphshard.planner import BudgetTooSmall, fsdp2_schedule, simulate
from graphshard.planning import planning
from graphshard.planning.extraction import Scene
from graphshard.planning.planning import Planning, RegionPlanning
from tests.graph.graphs import toy_forward, toy_weights

SCENE = Scene(CostModel(HARDWARE["h100"]), lambda name: GroupShape(4, 1))


def unforeseen(num_bytes: int) -> Callable[[GraphModule, str], None]:
    """Adds an allocation that lives as long as the program."""

    def add(gm: GraphModule, direction: str) -> None:
        first = next(node for node in gm.graph.nodes if node.op != "placeholder")
        with gm.graph.inserting_before(first):
            node = gm.graph.call_function(aten.new_zeros.default, (first.all_input_nodes[0], [num_bytes // 4]))
        node.meta["val"] = torch.empty(num_bytes // 4, device="meta")
        with gm.graph.inserting_before(output_node(gm.graph)):
            gm.graph.call_function(aten.clone.default, (node,)).meta["val"] = torch.empty(0, device="meta")

    return add


def lowered(
    budget_bytes: int | None, unforeseen_bytes: int, note: Callable[[str], None] = print
) -> tuple[int, Decision]:
    marked = toy_forward(toy_weights(6))
    planner = RegionPlanning(Planning(SCENE, budget_bytes=budget_bytes), note=note)
    with after_lowering(unforeseen(unforeseen_bytes)):
        program, decision = lower_within_budget(marked.gm, marked.ctx, "test", planner, "default")
    assert decision is not None
    return peak_bytes(program.gm.graph, marked.ctx), decision


def test_what_the_graph_allocates_above_the_plan_is_planned_again() -> None:
    at_ease, easy = lowered(10**6, 4)
    peak, decision = lowered(at_ease, 400)
    assert peak <= decision.budget_bytes == at_ease
    assert decision.choice.simulation.peak_bytes < easy.choice.simulation.peak_bytes


def test_a_budget_that_was_asked_for_and_is_not_kept_is_an_error() -> None:
    with pytest.raises(
        BudgetTooSmall, match=r"memory_budget: got 200000 bytes for forward, want at least \d{6}: .* test"
    ):
        lowered(200_000, 2**18)


def test_without_a_budget_it_is_what_the_graph_of_fsdp2s_schedule_allocates() -> None:
    peak, decision = lowered(None, 2**18)
    assert decision.choice.name != "fsdp2"
    assert 2**18 < peak <= decision.budget_bytes


def test_fsdp2s_schedule_is_taken_where_the_graphs_of_all_others_allocate_more() -> None:
    marked, notes = toy_forward(toy_weights(6)), list[str]()
    planner = RegionPlanning(Planning(SCENE), note=notes.append)

    def add(gm: GraphModule, direction: str) -> None:
        if planner.latest is not None and planner.latest.choice.name != "fsdp2":
            unforeseen(2**18)(gm, direction)

    with after_lowering(add):
        program, decision = lower_within_budget(marked.gm, marked.ctx, "test", planner, "default")
    assert decision is not None and decision.choice.name == "fsdp2"
    assert decision.choice.simulation == simulate(decision.problem, fsdp2_schedule(decision.problem))
    assert peak_bytes(program.gm.graph, marked.ctx) <= decision.budget_bytes < 2**18
    assert notes == ["test: no other plan keeps to the memory of FSDP2's, which is taken"]


def test_units_that_stay_gathered_come_on_top_where_nothing_else_fits_which_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes = list[str]()
    monkeypatch.setattr(RegionPlanning, "keeps_units", True)
    monkeypatch.setattr(RegionPlanning, "_fsdp2_bytes", lambda self, way, fsdp2, on_top: fsdp2.peak_bytes * on_top)
    peak, decision = lowered(None, 0, notes.append)
    assert peak <= decision.budget_bytes == simulate(decision.problem, fsdp2_schedule(decision.problem)).peak_bytes
    less = "for less, want reshard_after_forward=True or a memory_budget"
    for unforeseen_bytes in (0, 2**18):
        notes.clear()
        peak, _ = lowered(None, unforeseen_bytes, notes.append)
        on_top = f"for units that stay gathered {peak} more than FSDP2's schedules by the flags of its capture"
        assert notes == [f"test [default]: allocates {peak} bytes, {on_top}; {less}"]


def test_nothing_is_noted_of_a_plan_within_the_memory_of_fsdp2s(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = list[str]()
    monkeypatch.setattr(RegionPlanning, "keeps_units", True)
    lowered(None, 0, notes.append)
    assert notes == []


def test_seconds_of_passes_are_those_of_every_try_without_the_planners(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_s, real = 0.2, planning.remembered_schedule

    def slowly(*args: object) -> object:
        time.sleep(slow_s)
        return real(*args)  # type: ignore[arg-type]

    def observe(gm: GraphModule, direction: str) -> None:
        tries.append(direction)
        time.sleep(slow_s / 4)
        unforeseen(400)(gm, direction)

    tries: list[str] = []
    at_ease, _ = lowered(10**6, 4)
    monkeypatch.setattr(planning, "remembered_schedule", slowly)
    marked = toy_forward(toy_weights(6))
    planner = RegionPlanning(Planning(SCENE, budget_bytes=at_ease))
    start_s = time.perf_counter()
    with after_lowering(observe):
        program, _ = lower_within_budget(marked.gm, marked.ctx, "test", planner, "default")
    took_s = time.perf_counter() - start_s
    assert len(tries) > 1
    assert planner.spent_s >= slow_s * len(tries)
    assert slow_s / 4 * len(tries) <= program.passes_s <= took_s - planner.spent_s
    assert (planner.newly_spent_s(), planner.newly_spent_s()) == (planner.spent_s, 0.0)
