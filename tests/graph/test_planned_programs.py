"""Any schedule of a marked graph becomes a program: same results, in the planned order, in the bytes foretold."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph

from graphshard.cost import HARDWARE, CostModel, GroupShape
from graphshard.fsdp2.settings import UnitSettings
from graphshard.graph.emit_reduction import ALL_REDUCE_BUCKET
from graphshard.graph.ir import (
    COALESCED_REDUCE_SCATTER,
    WAIT,
    Flags,
    PassContext,
    aten,
    collective,
    is_call,
    launches,
    reductions,
    val,
    waits_of,
)
from graphshard.graph.liveness import allocations_of, held_by_caller, live_bytes, live_ranges, peak_bytes
from graphshard.graph.plan import END
from graphshard.lowering import driver
from graphshard.planner import (
    Bucket,
    Problem,
    Schedule,
    ScheduledStep,
    check_schedule,
    fixed_size_schedule,
    fsdp2_schedule,
    is_coalesced,
    simulate,
)
from graphshard.planning.extraction import Scene, extract_problem
from graphshard.planning.named_plan import bucket_is_coalesced, named_plan
from graphshard.planning.planning import Planning, RegionPlanning
from tests.graph.graphs import (
    BATCH,
    BF16,
    CLASSES,
    F32,
    WIDTH,
    GraphBuilder,
    Marked,
    Weight,
    lowered_until,
    toy_backward,
    toy_forward,
    toy_weights,
)
from tests.graph.lockstep import mesh_groups, run_ranks

EXAMPLES = settings(max_examples=40)
SCENE = Scene(CostModel(HARDWARE["h100"]), lambda name: GroupShape(4, 1))
COALESCING = replace(SCENE, coalesces=lambda group, kind: True)

LAYOUTS = st.sampled_from(
    [
        {"world_size": 2},
        {"world_size": 4},
        {"world_size": 2, "param_dtype": BF16, "reduce_dtype": F32},
        {"world_size": 3, "dim": 0},
        {"world_size": 2, "replicas": 2},
        {"world_size": 1, "replicas": 2},
    ]
)


@st.composite
def schedules(draw: st.DrawFn, problem: Problem) -> Schedule:
    """Any buckets of equal keys, launched and awaited anywhere that is allowed."""
    end = len(problem.ops)
    buckets, steps = [], []
    for kind, items in (("gather", problem.gathers), ("reduce", problem.reductions)):
        groups: dict[tuple[int, int], list[int]] = {}
        for i, item in enumerate(items):
            groups.setdefault((item.key, draw(st.integers(0, 2))), []).append(i)
        for group in groups.values():
            number, members = len(buckets), [items[i] for i in group]
            buckets.append(Bucket(kind, tuple(group)))  # type: ignore[arg-type]
            last = min(item.first_use for item in members) if kind == "gather" else end  # type: ignore[union-attr]
            launch = draw(st.integers(max(item.ready for item in members), last))
            wait = draw(st.integers(launch, last))
            steps += [
                (launch, 0, ScheduledStep(launch, "launch", number)),
                (wait, 1, ScheduledStep(wait, "wait", number)),
            ]
            if getattr(members[0], "then", None) is not None:
                finish = draw(st.integers(wait, end))
                steps.append((finish, 2, ScheduledStep(finish, "finish", number)))
    return Schedule(tuple(buckets), tuple(step for *_, step in sorted(steps)))


def lowered(marked: Marked, schedule: Schedule | None, problem: Problem | None = None, fuses: bool = False) -> Any:
    found = problem or extract_problem(marked.graph, marked.ctx, SCENE)
    planner = None if schedule is None else lambda graph, ctx: named_plan(found, schedule)
    ctx = replace(marked.ctx, planner=planner, fuses=fuses, coalesces=partial(bucket_is_coalesced, found))
    return driver.lower(marked.gm, ctx, "test").gm


def toys(layout: dict[str, Any]) -> list[tuple[Marked, Callable[[int], list[Tensor]]]]:
    """Forward and backward, each with the arguments of a rank."""
    weights = [replace(weight, **layout) for weight in toy_weights(3)]
    dtype = weights[0].spec.dtype

    def shards(rank: int) -> list[Tensor]:
        full = [torch.randn(w.size, generator=torch.Generator().manual_seed(i)) for i, w in enumerate(weights)]
        return [w.shards(value)[rank % w.world_size] for w, value in zip(weights, full, strict=True)]

    def data(rank: int, *sizes: tuple[int, ...]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(100 + rank)
        return [torch.randn(size, generator=generator).to(dtype) for size in sizes]

    hidden = [(BATCH, WIDTH)] * 4
    return [
        (toy_forward(weights), lambda rank: [*data(rank, hidden[0]), *shards(rank)]),
        (toy_backward(weights), lambda rank: [*shards(rank), *data(rank, *hidden, (BATCH, CLASSES))]),
    ]


@EXAMPLES
@given(st.data(), LAYOUTS, st.sampled_from([0, 1]), st.booleans(), st.booleans())
def test_any_schedule_gives_the_same_results_in_its_order_and_bytes(
    data: st.DataObject, layout: dict[str, Any], which: int, fuses: bool, coalesces: bool
) -> None:
    marked, arguments = toys(layout)[which]
    scene = COALESCING if coalesces else SCENE
    problem = extract_problem(marked.graph, replace(marked.ctx, fuses=fuses), scene)
    schedule = data.draw(schedules(problem))
    check_schedule(problem, schedule)
    planned = lowered(marked, schedule, problem, fuses)
    _assert_in_order(planned.graph, problem, schedule)
    _assert_foretold(planned.graph, marked.ctx, problem, simulate(problem, schedule).live_bytes)
    world_size, replicas = layout["world_size"], layout.get("replicas", 1)
    ranks, groups = range(world_size * replicas), mesh_groups(replicas, world_size)
    usual = lowered(marked, None)
    got, want = (run_ranks(gm, [arguments(rank) for rank in ranks], groups) for gm in (planned, usual))
    for ours, theirs in zip(got, want, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def _assert_foretold(graph: Graph, ctx: PassContext, problem: Problem, foretold: tuple[int, ...]) -> None:
    """At each node, no more than is foretold for its op; what is inserted between two counts with either."""
    at, behind, ops = 0, dict.fromkeys(graph.nodes, 0), [*problem.ops, END]
    for node in graph.nodes:
        at += node.name == ops[at] and at < len(problem.ops)
        behind[node] = at  # one more than the op that began last
    live = live_bytes(live_ranges(graph, held_by_caller(ctx)), len(behind))
    for (node, i), num_bytes in zip(behind.items(), live, strict=True):
        assert num_bytes <= max(foretold[max(0, i - 1) : i + 1]), (node, num_bytes, i)


def _assert_in_order(graph: Any, problem: Problem, schedule: Schedule) -> None:
    plan = named_plan(problem, schedule)
    name_of = {launch: found.bucket for launch in launches(graph) if (found := collective(launch)) is not None}
    behind = {name.removesuffix(ALL_REDUCE_BUCKET) for name in name_of.values() if name.endswith(ALL_REDUCE_BUCKET)}
    want, at = [], 0
    for step in plan.steps:
        second = step.bucket + ALL_REDUCE_BUCKET
        want += {
            "launch": [("launch", step.bucket, step.before)],
            "wait": [("wait", step.bucket, step.before)]
            + ([("launch", second, step.before)] if step.bucket in behind else []),
            "finish": [("wait", second, step.before)],
        }[step.step]
    got = []
    ops = [*problem.ops, END]
    for node in graph.nodes:
        if at < len(problem.ops) and node.name == problem.ops[at]:
            at += 1
        if node in name_of:
            got.append(("launch", name_of[node], ops[at]))
        elif is_call(node, WAIT):
            source = node.args[0].args[0] if is_call(node.args[0], operator.getitem) else node.args[0]
            arrived = ("wait", name_of[source], ops[at])
            got += [arrived] * (got[-1] != arrived)  # one wait for each tensor of a coalesced bucket
    assert got == want


def test_problem_counts_what_moves() -> None:
    weights = toy_weights(1, world_size=4, param_dtype=BF16, reduce_dtype=F32)
    forward = extract_problem(toy_forward(weights).graph, toy_forward(weights).ctx, SCENE)
    marked = toy_backward(weights)
    backward = extract_problem(marked.graph, marked.ctx, SCENE)
    padded = {"blocks.0.weight": 8 * WIDTH, "blocks.0.bias": 8, "head": 8 * WIDTH}
    assert {gather.fqn: gather.wire_bytes for gather in forward.gathers} == {k: 2 * v for k, v in padded.items()}
    assert {red.fqn: red.wire_bytes for red in backward.reductions} == {k: 4 * v for k, v in padded.items()}
    assert [gather.first_use for gather in forward.gathers] == sorted(g.first_use for g in forward.gathers)
    assert {gather.unit for gather in forward.gathers} == {"blocks.0", ""}


def test_units_of_other_settings_have_keys_of_their_own() -> None:
    marked = toy_backward(toy_weights(2))
    ctx = replace(marked.ctx, flags=Flags(units=(("blocks.0", UnitSettings(divide_factor=3.0)),)))
    keys = {item.unit: item.key for item in extract_problem(marked.graph, ctx, SCENE).reductions}
    assert keys["blocks.1"] == keys[""] != keys["blocks.0"]


def test_prefetches_that_users_chose_leave_the_order_to_them() -> None:
    marked = toy_forward(toy_weights(2))
    planning = RegionPlanning(Planning(SCENE))
    flags = Flags(units=(("blocks.0", UnitSettings(forward_prefetch=("blocks.1",))),))
    assert planning(marked.graph, replace(marked.ctx, flags=flags)) is None
    assert planning(marked.graph, marked.ctx) is not None


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_of_fsdp2s_schedule_are_foretold_closely(world_size: int, which: int) -> None:
    marked, _ = toys({"world_size": world_size})[which]
    problem = extract_problem(marked.graph, marked.ctx, SCENE)
    schedule = fsdp2_schedule(problem)
    peak = peak_bytes(lowered(marked, schedule).graph, marked.ctx)
    # Above it by what an op and the copies in front of it do not hold at the same time.
    assert peak <= simulate(problem, schedule).peak_bytes <= 1.2 * peak


def test_gradient_behind_views_is_foretold_from_where_it_is_computed() -> None:
    marked = toy_backward(toy_weights(3))
    for marker in reductions(marked.graph):
        grad = marker.all_input_nodes[0]
        if len(val(grad).shape) == 2:
            view = grad
            for _ in range(2):
                with marked.graph.inserting_after(view):
                    view = marked.graph.call_function(aten.t.default, (view,))
                view.meta["val"] = val(view.all_input_nodes[0]).t()
            marker.replace_input_with(grad, view)
    problem = extract_problem(marked.graph, marked.ctx, SCENE)
    schedule = fsdp2_schedule(problem)
    _assert_foretold(lowered(marked, schedule).graph, marked.ctx, problem, simulate(problem, schedule).live_bytes)


@pytest.mark.parametrize("make", [fsdp2_schedule, fixed_size_schedule])
def test_gradient_that_comes_with_another_result_is_foretold_until_it_is_sent(make: Callable[..., Schedule]) -> None:
    build = GraphBuilder("backward")
    weights = [Weight(f"blocks.{i}.weight", (8, 8, 3, 3), i) for i in range(4)]
    for weight in weights:
        build.shard(weight)
    hidden = [build.input(f"hidden_{i}", (2, 8, 3, 3)) for i in range(4)]
    grad, reduced = build.input("tangents_1", (2, 8, 3, 3)), []
    as_usual = ([0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    for weight, x in zip(weights, hidden, strict=True):
        both = build.call(aten.convolution_backward.default, grad, x, build.unshard(weight), *as_usual)
        grad = build.call(operator.getitem, both, 0)
        reduced.append(build.reduce(build.call(operator.getitem, both, 1), weight))
    marked = build.finish(*reduced, grad)
    problem = extract_problem(marked.graph, marked.ctx, SCENE)
    assert [reduction.grad_bytes for reduction in problem.reductions] == [4 * 8 * 8 * 9] * 4
    schedule = make(problem)
    _assert_foretold(lowered(marked, schedule).graph, marked.ctx, problem, simulate(problem, schedule).live_bytes)


def test_fsdp2_mode_times_but_does_not_place() -> None:
    marked = toy_forward(toy_weights(2))
    planning = RegionPlanning(Planning(SCENE, mode="fsdp2"))
    assert planning(marked.graph, marked.ctx) is None
    assert planning.latest is not None and planning.latest.choice.name == "fsdp2"
    assert planning.latest.choice.simulation.step_us >= planning.latest.choice.lower_bound_us


def test_fused_copies_are_planned_without_their_scratch_and_kernels() -> None:
    weights = [replace(w, dim=len(w.size) - 1) for w in toy_weights(3, world_size=2, param_dtype=torch.bfloat16)]
    for marked in (toy_forward(weights), toy_backward(weights)):
        usual, fused = (extract_problem(marked.graph, replace(marked.ctx, fuses=f), SCENE) for f in (False, True))
        assert not any(gather.scratch_bytes for gather in fused.gathers) and all(g.scratch_bytes for g in usual.gathers)
        for before, after in zip((*usual.gathers, *usual.reductions), (*fused.gathers, *fused.reductions), strict=True):
            assert after.copy_in_us < before.copy_in_us
            assert after.scratch_bytes <= before.scratch_bytes
            assert after.alone_in_us == before.alone_in_us


@pytest.mark.parametrize("which", [0, 1])
def test_bucket_is_coalesced_where_that_takes_less_than_its_copies(which: int) -> None:
    marked, _ = toys({"world_size": 3})[which]
    problem = extract_problem(marked.graph, marked.ctx, COALESCING)
    # Small tensors: a kernel each to copy in, and one more to copy a gathered one out.
    problem = replace(problem, reductions=tuple(replace(item, coalesced_us=1.0) for item in problem.reductions))
    schedule = fsdp2_schedule(problem)
    buckets = [schedule.members(problem, number) for number in range(len(schedule.buckets))]
    several = [members for members in buckets if len(members) > 1]
    assert several and all(map(is_coalesced, several))
    graph = lowered(marked, schedule, problem).graph
    assert not graph.find_nodes(op="call_function", target=aten.cat.default)
    assert {len(waits_of(launch)) for launch in launches(graph)} >= {len(members) for members in several}
    dear = [replace(member, coalesced_us=1e6) for member in several[0]]  # type: ignore[type-var]
    assert not is_coalesced(dear) and not is_coalesced(several[0][:1])  # type: ignore[arg-type]
    fused = extract_problem(marked.graph, replace(marked.ctx, fuses=True), COALESCING)
    assert not any(is_coalesced(schedule.members(fused, number)) for number in range(len(buckets)))


def test_what_needs_a_flat_buffer_is_not_coalesced() -> None:
    for layout in ({"world_size": 2, "replicas": 2}, {"world_size": 1, "replicas": 2}):
        marked = toy_backward([replace(weight, **layout) for weight in toy_weights(2)])
        found = extract_problem(marked.graph, marked.ctx, COALESCING)
        assert all(reduction.coalesced_us is None for reduction in found.reductions)
        assert all(gather.coalesced_us is not None for gather in found.gathers)
    mixed = [replace(weight, param_dtype=dtype) for weight, dtype in zip(toy_weights(1), (F32, BF16, F32), strict=True)]
    marked = toy_forward(mixed)
    assert all(g.coalesced_us is None for g in extract_problem(marked.graph, marked.ctx, COALESCING).gathers)
    for settings_ in (UnitSettings(custom_all_gather="k"), UnitSettings(custom_reduce_scatter="k")):
        marked = toy_backward(toy_weights(1))
        flags = Flags(units=(("blocks.0", settings_),))
        found = extract_problem(marked.graph, replace(marked.ctx, flags=flags), COALESCING)
        for item in (*found.gathers, *found.reductions):
            custom = settings_.custom_all_gather if item in found.gathers else settings_.custom_reduce_scatter
            assert (item.coalesced_us is None) == bool(custom and item.unit == "blocks.0")


def test_input_of_a_coalesced_launch_is_held_until_its_last_wait() -> None:
    lowered = lowered_until(toy_backward(toy_weights(1, world_size=2, reduce_dtype=BF16)).coalescing())
    launch = next(node for node in launches(lowered.graph) if node.target is COALESCED_REDUCE_SCATTER)
    place = {node: i for i, node in enumerate(lowered.graph.nodes)}
    ranges = live_ranges(lowered.graph, held_by_caller(lowered.ctx))
    for sent in launch.all_input_nodes:
        (allocation,) = allocations_of(lowered.graph)[sent]
        assert ranges[allocation][1] == place[waits_of(launch)[-1]]
