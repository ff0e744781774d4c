"""A pass over several regions, planned as one problem: whole units, launched between regions."""

from __future__ import annotations

import pytest
from graphs import GraphBuilder

from graphshard.graph.ir import aten
from graphshard.planner import (
    GatherTask,
    OwnCollective,
    Problem,
    ReductionTask,
    RegionRun,
    Transfer,
    check_schedule,
    fsdp2_schedule,
    pass_problem,
    simulate,
)
from graphshard.planning.pass_plan import PassPlan, plan_pass, region_run

MB = 10**6


def region(
    unit: str,
    *,
    compute_us: float = 100.0,
    gather_us: float = 50.0,
    reduce_us: float = 0.0,
    latency_us: float = 0.0,
    then: bool = False,
    streams: tuple[str, ...] = ("shards",),
) -> Problem:
    """Three ops; two parameters of one unit are gathered for the second, and reduced behind it."""
    stream = streams.index("shards")
    wire = Transfer(stream, ((latency_us, gather_us / (2 * MB)),))
    back = Transfer(stream, ((latency_us, reduce_us / (2 * MB)),))
    gathers = [GatherTask(f"{unit}.{i}", unit, 0, wire, MB, MB, 1, 2, copy_out_us=0.0) for i in range(2) if gather_us]
    copies = Transfer(stream, ((10.0, 0.0),))
    reductions = [
        ReductionTask(f"{unit}.{i}", unit, 0, back, MB, MB, MB // 2, 2, then=copies if then else None)
        for i in range(2)
        if reduce_us
    ]
    return Problem(
        "backward",
        ("a", "b", "c"),
        (0.0, compute_us, 0.0),
        (100, 200, 100),
        tuple(gathers),
        tuple(reductions),
        streams=streams,
    )


def runs(*problems: Problem, kept_bytes: int = 0, stay: bool = False) -> list[RegionRun]:
    """Each gathers its unit as a whole, and reduces it."""
    return [
        RegionRun(
            problem,
            kept_bytes,
            {problem.gathers[0].unit: (tuple(g.fqn for g in problem.gathers), None if stay else at)},
            frozenset(r.unit for r in problem.reductions),
        )
        for at, problem in enumerate(problems)
    ]


def planned(problems: list[Problem], budget_bytes: int | None = None, kept_bytes: int = 0) -> PassPlan | None:
    made = runs(*problems, kept_bytes=kept_bytes)
    gathers, reductions = [run.gathers for run in made], [run.reductions for run in made]
    return plan_pass([RegionRun(run.problem, run.kept_bytes) for run in made], gathers, reductions, budget_bytes)


def test_unit_is_one_task_from_the_run_that_needs_it_to_the_last_that_uses_it() -> None:
    x, y = region("x"), region("y")
    gathers = {"x": (("x.0", "x.1"), 2)}
    problem = pass_problem([RegionRun(y), RegionRun(x, gathers=gathers), RegionRun(x)])
    (gather,) = problem.gathers
    assert (gather.unit, gather.wire_bytes, gather.first_use, gather.last_use) == ("x", 2 * MB, 1, 2)
    assert problem.op_us == (100.0, 100.0, 100.0)


def test_parameter_of_a_split_unit_is_found_in_the_run_that_uses_it() -> None:
    ops = (("a", "b", "c"), (0.0, 1.0, 0.0), (1, 1, 1))
    first, second = (Problem("forward", *ops, (gather,), (), streams=("shards",)) for gather in region("x").gathers)
    problem = pass_problem([RegionRun(first, gathers={"x": (("x.0", "x.1"), 1)}), RegionRun(second)])
    assert [gather.wire_bytes for gather in problem.gathers] == [2 * MB]


def test_unit_that_is_gathered_again_is_another_task_behind_its_last_use() -> None:
    x, y = region("x"), region("y")
    once, again = ({"x": (("x.0", "x.1"), at)} for at in (0, 2))
    problem = pass_problem([RegionRun(x, gathers=once), RegionRun(y), RegionRun(x, gathers=again)])
    assert [(gather.fqn, gather.ready, gather.first_use) for gather in problem.gathers] == [
        ("x@0", 0, 0),
        ("x@2", 1, 2),
    ]


def test_unit_that_stays_is_held_to_the_end() -> None:
    assert [g.last_use for g in pass_problem(runs(region("x"), region("y"), stay=True)).gathers] == [2, 2]


def test_what_forward_keeps_for_backward_is_counted_in_both() -> None:
    forward = pass_problem(runs(region("x"), region("y"), region("z"), kept_bytes=MB))
    backward = pass_problem(runs(region("z"), region("y"), region("x"), kept_bytes=-MB))
    most = max(region("x").op_bytes)
    assert [num_bytes - most for num_bytes in forward.op_bytes] == [0, MB, 2 * MB]
    assert [num_bytes - most for num_bytes in backward.op_bytes] == [2 * MB, MB, 0]


@pytest.mark.parametrize("kept", [[MB, -MB, MB, -MB], [-MB, MB, -MB, MB, -MB], [-MB, MB]])
def test_what_a_checkpoint_recomputes_in_backward_is_there_until_its_backward(kept: list[int]) -> None:
    problem = pass_problem([RegionRun(region("x"), kept_bytes) for kept_bytes in kept])
    most = max(region("x").op_bytes) + 2 * MB  # gathered in the region itself
    assert [num_bytes - most for num_bytes in problem.op_bytes] == [0] * len(kept)


def test_length_that_a_trace_has_made_a_constant_takes_no_memory() -> None:
    build = GraphBuilder()
    kept = build.call(aten.relu.default, build.input("x", [4, 8]))
    marked = build.finish(8, kept, None)
    assert region_run(marked.graph, marked.ctx, region("x")).kept_bytes == 4 * 8 * 4


def test_collectives_of_a_region_take_their_time_beside_it() -> None:
    first, second = region("x"), region("y", reduce_us=7.0, then=True)
    own = OwnCollective("sum", 0, 5.0, 1, 2)
    first = Problem(first.direction, first.ops, first.op_us, first.op_bytes, (), (), (own,), first.streams)
    problem = pass_problem([RegionRun(first), RegionRun(second)])
    assert [(found.us, found.launch, found.wait) for found in problem.own] == [
        (5.0, 0, 1),
        (50.0, 1, 2),
        (7.0, 1, 2),
        (10.0, 1, 2),
    ]


def test_process_groups_are_found_by_name() -> None:
    problem = pass_problem(runs(region("x"), region("y", streams=("other", "shards"))))
    assert problem.streams == ("shards", "other")
    assert {gather.transfer.stream for gather in problem.gathers} == {0}


def test_fsdp2s_schedule_of_it_is_one_unit_ahead() -> None:
    problem = pass_problem(runs(*(region(unit, reduce_us=5.0) for unit in "wxyz")))
    check_schedule(problem, fsdp2_schedule(problem))
    simulation = simulate(problem, fsdp2_schedule(problem))
    assert simulation.exposed_us == pytest.approx(50.0 + 5.0)  # of the first gather, and of the last reduction


def test_equal_blocks_share_a_run_but_for_names() -> None:
    run = RegionRun(region("x", reduce_us=1.0)).renamed({"x.0": ("y.0", "y"), "x.1": ("y.1", "y")})
    assert [task.fqn for task in (*run.problem.gathers, *run.problem.reductions)] == ["y.0", "y.1"] * 2
    assert {task.unit for task in (*run.problem.gathers, *run.problem.reductions)} == {"y"}


def test_units_are_gathered_and_reduced_together_where_collectives_take_long_to_begin() -> None:
    problems = [region(unit, gather_us=2.0, reduce_us=2.0, latency_us=500.0, compute_us=50.0) for unit in "stuvwxyz"]
    plan = planned(problems, 10**9)
    assert plan is not None and plan.predicted_us < plan.one_ahead_us
    assert len(plan.gathers) < 5 and len(plan.reductions) < 5
    assert [unit for group in plan.gathers for unit, _ in group.units] == list("stuvwxyz")
    assert sorted(unit for group in plan.reductions for unit in group.units) == list("stuvwxyz")
    assert all(group.launch <= place for group in plan.gathers for _, place in group.units)
    assert PassPlan.parse(plan.text()) == plan


def test_together_takes_no_more_memory_than_one_unit_ahead() -> None:
    problems = [region(unit, gather_us=2.0, latency_us=500.0, compute_us=50.0) for unit in "stuvwxyz"]
    tight, roomy = planned(problems), planned(problems, kept_bytes=4 * MB)
    assert tight is not None and roomy is not None
    # What forward keeps for backward is not there yet when it begins.
    assert len(roomy.gathers) < len(tight.gathers)


def test_nothing_is_planned_where_nothing_fits_or_nothing_is_sent() -> None:
    assert planned([region("x"), region("y")], 1) is None
    empty = Problem("forward", ("a",), (1.0,), (1,), (), ())
    assert plan_pass([RegionRun(empty)] * 2, [{}, {}], [frozenset()] * 2, None) == PassPlan((), ())
