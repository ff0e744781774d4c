"""Stored plans: replayed for the program that was planned, refused for others; what differs between two is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from expecttest import assert_expected_inline
from graphs import GraphBuilder, Marked, Weight, toy_forward, toy_weights
from hypothesis import given
from plans import (
    EXAMPLES,
    RANKS,
    backward,
    backward_plan,
    decided,
    gather,
    plan_of,
    plans,
    problems,
    reduction,
    wrapped,
)

from graphshard.cost import HARDWARE, CostModel, GroupShape
from graphshard.fsdp2.settings import UnitSettings
from graphshard.graph.ir import aten
from graphshard.plan_file import (
    Plan,
    PlanMismatch,
    ProgramProblem,
    outline_changes,
    outline_of,
    plan_changes,
    problem_of,
    replay,
    stored_program,
)
from graphshard.planner import Problem, fsdp2_schedule, per_parameter_schedule
from graphshard.planning.extraction import Scene, extract_problem
from graphshard.planning.planning import Planning, RegionPlanning

FLAGS = "resident=1"
SIDES = ("in a", "in b")


def ranks(name: str) -> int:
    return RANKS[name]


def asked(problem: Problem, flags: str = FLAGS, region: int = 0) -> ProgramProblem:
    fqns = frozenset(item.fqn for item in (*problem.gathers, *problem.reductions))
    return ProgramProblem(region, problem.direction, flags, lambda cuts: problem, ranks, fqns)


# --- replay


@EXAMPLES
@given(plans())
def test_replay_decides_what_was_stored(plan: Plan) -> None:
    plan = replace(plan, mode="auto")
    for stored in plan.programs:
        found = problem_of(stored.outline)
        counted = dict(zip(found.streams, stored.outline.group_ranks, strict=True)).__getitem__
        program = replace(asked(found, stored.flags, stored.region), ranks_of=counted)
        decision = replay(plan, program, "a plan")
        assert decision is not None
        assert decision.plan == stored.plan
        assert decision.choice.schedule == stored.schedule
        assert decision.choice.name == stored.chosen


def test_replay_asks_for_the_ops_of_the_file() -> None:
    seen = []
    program = replace(asked(backward()), extract=lambda cuts: seen.append(cuts) or backward())
    replay(backward_plan(), program, "a plan")
    assert seen == [frozenset({"mm", "relu", "mm_1", "sum"})]


def test_replay_finds_programs_by_name() -> None:
    plan = backward_plan()
    assert replay(plan, asked(backward()), "a plan") is not None
    assert replay(plan, asked(backward(), flags="default"), "a plan") is None
    assert replay(plan, asked(backward(), region=1), "a plan") is None
    assert replay(plan, asked(backward(direction="forward")), "a plan") is None


def test_programs_of_other_flags_must_be_of_the_model_that_was_planned() -> None:
    def refused(problem: Problem, fqns: frozenset[str] | None = None) -> str:
        other = asked(problem, flags="resident=2")
        with pytest.raises(PlanMismatch) as caught:
            replay(backward_plan(), other if fqns is None else replace(other, fqns=fqns), "a.json")
        return str(caught.value).partition(". It was")[0]

    weight, bias, last = backward().gathers
    resident = backward(gathers=(weight, bias))
    assert replay(backward_plan(), asked(resident, flags="resident=2"), "a.json") is None
    unrelated = backward(gathers=(gather("blocks.7.weight", 0),), reductions=())
    assert replay(backward_plan(), asked(unrelated, flags="resident=2"), "a.json") is None
    lines = [
        refused(backward(gathers=(weight, bias, last, gather("norm", 3)))),
        refused(backward(gathers=(replace(weight, wire_bytes=64), bias, last))),
        refused(resident, frozenset({"blocks.1.weight", "blocks.1.bias"})),
    ]
    assert_expected_inline(
        wrapped(lines),
        """\
a.json: region 0 backward [resident=1]: the model is not the one that was planned: parameters only in the
    model: norm
a.json: region 0 backward [resident=1]: the model is not the one that was planned: parameters of other sizes:
    blocks.1.weight
a.json: region 0 backward [resident=1]: the model is not the one that was planned: parameters only in the
    file: blocks.0.weight""",
    )


def test_replay_tells_programs_of_one_name_apart_by_hash() -> None:
    other = backward(gathers=(gather("blocks.7.weight", 0),))
    plan = plan_of((0, FLAGS, backward(), fsdp2_schedule(backward())), (0, FLAGS, other, fsdp2_schedule(other)))
    assert len(plan.programs) == 2
    for problem in (backward(), other):
        decision = replay(plan, asked(problem), "a plan")
        assert decision is not None
        assert decision.plan == decided(problem, fsdp2_schedule(problem)).plan
    with pytest.raises(PlanMismatch, match=r"parameters only in the model: blocks\.8\.weight"):
        replay(plan, asked(backward(gathers=(gather("blocks.8.weight", 0),))), "a plan")


def of_two_ranks(group: str) -> GroupShape:
    return GroupShape(2, 1)


def sines() -> Marked:
    """Two products, of gathered weights, with small operators behind them."""
    build = GraphBuilder()
    weights = [Weight(f"blocks.{i}.weight", (6, 6)) for i in range(2)]
    hidden = build.input("x", [4, 6])
    for weight in weights:
        build.shard(weight)
    for weight in weights:
        hidden = build.call(aten.mm.default, hidden, build.unshard(weight))
        for _ in range(3):
            hidden = build.call(aten.sin.default, hidden)
    return build.finish(hidden)


def test_plan_fits_when_only_costs_change() -> None:
    marked = sines()
    h100 = HARDWARE["h100"]
    slow = replace(h100, matmul_tflops={"float32": 1e-6}, kernel_us=1e-3)
    scenes = [Scene(CostModel(hardware, fused=False), of_two_ranks) for hardware in (h100, slow)]
    first = RegionPlanning(Planning(scenes[0]))
    named = first(marked.graph, marked.ctx)
    decision = first.latest
    assert decision is not None
    assert extract_problem(marked.graph, marked.ctx, scenes[1]).ops != decision.problem.ops  # other nodes are joined
    stored = stored_program(0, "default", decision, outline_of(decision.problem, Planning(scenes[0]).ranks_of))
    plan = replace(backward_plan(), programs=(stored,))
    notes: list[str] = []
    second = RegionPlanning(Planning(scenes[1], stored=plan, stored_in="a plan"), 0, notes.append)
    assert second(marked.graph, marked.ctx) == named
    again = second.latest
    assert again is not None
    assert again.choice.schedule == decision.choice.schedule
    assert again.choice.simulation.step_us > decision.choice.simulation.step_us
    assert notes == []


def test_programs_without_a_plan_are_planned_and_noted() -> None:
    marked = toy_forward(toy_weights(2))
    scene = Scene(CostModel(HARDWARE["h100"]), of_two_ranks)
    notes: list[str] = []
    storing = Planning(scene, stored=backward_plan(), stored_in="plan file a.json")
    planned, replaying = RegionPlanning(Planning(scene)), RegionPlanning(storing, 0, notes.append)
    assert replaying(marked.graph, marked.ctx) == planned(marked.graph, marked.ctx)
    assert replaying.latest == planned.latest
    settings = (("blocks.0", UnitSettings(forward_prefetch=("blocks.1",))),)
    chosen = marked.flagged(units=settings)
    assert replaying(chosen.graph, chosen.ctx) is None
    assert notes == [
        "plan file a.json: has no plan for region 0 forward [default], which is planned as by plan='auto'",
        "plan file a.json: not used for region 0 forward [default], whose units say what they prefetch",
    ]
    assert Planning(scene).fingerprint != storing.fingerprint


def refusal(problem: Problem, plan: Plan | None = None, budget_bytes: int | None = None) -> str:
    with pytest.raises(PlanMismatch) as caught:
        replay(plan or backward_plan(), asked(problem), "plan file a.json", budget_bytes)
    return str(caught.value)


def test_other_programs_are_refused_by_what_has_changed() -> None:
    weight, bias, last = backward().gathers
    bias_grad = backward().reductions[1]
    changed = {
        "missing": backward(gathers=(weight, last), reductions=(backward().reductions[0], backward().reductions[2])),
        "new": backward(gathers=(*backward().gathers, *(gather(f"blocks.0.{i}", 3) for i in range(5)))),
        "renamed": backward(gathers=(weight, replace(bias, fqn="blocks.1.offset"), last)),
        "gathered already": backward(gathers=(weight, bias)),
        "frozen": backward(reductions=tuple(r for r in backward().reductions if r != bias_grad)),
        "wider": backward(gathers=(replace(weight, wire_bytes=8192, full_bytes=8192), bias, last)),
        "other unit": backward(gathers=(weight, replace(bias, unit="blocks"), last)),
        "other ops": backward(ops=("mm", "gelu", "mm_1", "sum")),
        "other sizes": backward(op_bytes=(5000, 6000, 9000, 5000)),
        "shorter": backward(ops=("mm", "relu", "mm_1"), op_us=(1.0,) * 3, op_bytes=(5000, 6000, 6000), reductions=()),
        "other uses": backward(gathers=(weight, bias, replace(last, first_use=3, last_use=3))),
        "other order": backward(gathers=(bias, weight, last)),
        "own collective": backward(own=()),
        "groups": backward(streams=("copies", "copies")),
    }
    lines = [f"{name}: {refusal(problem)}" for name, problem in changed.items()]
    start = "plan file a.json: region 0 backward [resident=1]: the program is not the one that was planned: "
    end = (
        ". It was planned with torch 2.13.0 and graphshard 0.1.0. "
        "Give the model, mesh and arguments (strategy, reshard_after_forward, mp_policy, backend) that it was planned "
        "for, or plan anew with plan='auto' and write it with graphshard.save_plan"
    )
    assert all(start in line and line.endswith(end) for line in lines)
    assert_expected_inline(
        wrapped([line.replace(start, "").removesuffix(end) for line in lines]),
        """\
missing: parameters only in the file: blocks.1.bias
new: parameters only in the model: blocks.0.0, blocks.0.1, blocks.0.2 and 2 more
renamed: only in the file: gather of blocks.1.bias; parameters only in the model: blocks.1.offset
gathered already: only in the file: gather of blocks.0.weight
frozen: only in the file: reduce of blocks.1.bias
wider: sizes: gather of blocks.1.weight has wire_bytes 4096 in the file and 8192 in the model
other unit: units: gather of blocks.1.bias has unit blocks.1 in the file and blocks in the model
other ops: first op that differs: number 1 is relu of 6000 bytes in the file and gelu of 6000 bytes in the
    model
other sizes: first op that differs: number 2 is mm_1 of 6000 bytes in the file and mm_1 of 9000 bytes in the
    model
shorter: only in the file: reduce of blocks.1.weight, reduce of blocks.1.bias, reduce of blocks.0.weight;
    first op that differs: number 3 is sum of 5000 bytes in the file and the end in the model
other uses: places: gather of blocks.0.weight has first_use 2 in the file and 3 in the model
other order: order of parameters: gather of blocks.1.weight, gather of blocks.1.bias, gather of
    blocks.0.weight and 3 more in the file and gather of blocks.1.bias, gather of blocks.1.weight, gather of
    blocks.0.weight and 3 more in the model
own collective: the model's own collectives: all_reduce (group 1, launch 1, wait 2) in the file and none in
    the model
groups: ranks of process groups: 4, 2 in the file and 2, 2 in the model""",
    )


@EXAMPLES
@given(problems(), problems())
def test_changes_are_said_exactly_where_outlines_differ(one: Problem, other: Problem) -> None:
    a, b = outline_of(one, ranks), outline_of(other, ranks)
    assert outline_changes(a, a, SIDES) == []
    assert bool(outline_changes(a, b, SIDES)) == (a != b)


def test_plans_that_do_not_do_what_the_file_says_are_refused() -> None:
    fsdp2 = replace(backward_plan(), mode="fsdp2")
    assert replay(fsdp2, asked(backward()), "a plan") is not None
    searched = plan_of((0, FLAGS, backward(), per_parameter_schedule(backward())), mode="fsdp2")
    (stored,) = backward_plan().programs
    tight = replace(backward_plan(), programs=(replace(stored, budget_bytes=stored.predicted.peak_bytes - 1),))
    lines = [refusal(backward(), searched), refusal(backward(), tight), refusal(backward(), budget_bytes=100)]
    assert_expected_inline(
        wrapped([line.partition(". It was")[0] for line in lines]),
        """\
plan file a.json: region 0 backward [resident=1]: got mode 'fsdp2' and other buckets or steps, want mode
    'auto'
plan file a.json: region 0 backward [resident=1]: got a plan that allocates 19456 bytes, want at most its
    budget_bytes, 19455
plan file a.json: region 0 backward [resident=1]: got a plan that allocates 19456 bytes, want at most its
    memory_budget, 100""",
    )


# --- diff


@EXAMPLES
@given(plans(), plans())
def test_diff_says_something_exactly_where_plans_differ(one: Plan, other: Plan) -> None:
    assert plan_changes(one, one, SIDES) == []
    assert bool(plan_changes(one, other, SIDES)) == (one != other)


def test_diff_says_what_differs() -> None:
    (stored,) = backward_plan().programs
    later = backward(reductions=(*backward().reductions[:2], reduction("blocks.0.weight", 3)))
    other = plan_of(
        (0, FLAGS, later, per_parameter_schedule(later)),
        (1, "default", backward(), fsdp2_schedule(backward())),
        mode="fsdp2",
        torch="2.15.0",
    )
    assert_expected_inline(
        wrapped(plan_changes(backward_plan(), other, SIDES)),
        """\
torch: 2.13.0 in a and 2.15.0 in b
mode: auto in a and fsdp2 in b
region 0 backward [resident=1]:
  inputs: places: reduce of blocks.0.weight has ready 4 in a and 3 in b
  bucket gather:blocks.1#2: only in b: blocks.1.bias
  bucket reduce:blocks.1#2: only in b: blocks.1.bias
  bucket gather:blocks.1: gather of 2 in a and gather of 1 in b
  bucket gather:blocks.1: first member that differs: number 1 is blocks.1.bias in a and none in b
  bucket reduce:blocks.1: reduce of 2 in a and reduce of 1 in b
  bucket reduce:blocks.1: first member that differs: number 1 is blocks.1.bias in a and none in b
  launch of gather:blocks.0: before mm (position 0) in a and before mm_1 (position 2) in b
  wait of reduce:blocks.1: at the end in a and before relu (position 1) in b
  launch of reduce:blocks.0: at the end in a and before sum (position 3) in b
  wait of reduce:blocks.0: at the end in a and before sum (position 3) in b
  budget_bytes: 19456 in a and 15232 in b
  predicted step_us: 337.56 in a and 450.12 in b
  predicted lower_bound_us: 327.56 in a and 322.56 in b
  predicted exposed_us: 112.56 in a and 225.12 in b
  predicted peak_bytes: 19456 in a and 15232 in b
region 1 backward [default]: only in b""",
    )
    kept = replace(backward_plan(), programs=(replace(stored, kept=("blocks.1",), chosen="fsdp2"),))
    assert_expected_inline(
        wrapped(plan_changes(backward_plan(), kept, SIDES)),
        """\
region 0 backward [resident=1]:
  kept: FSDP2's in a and blocks.1 in b
  chosen: search in a and fsdp2 in b""",
    )
