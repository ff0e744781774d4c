"""A contract is what a program launches; another program of the same parameters launches that, too, or says why not."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from graphshard.agree.contract import Contract, ContractParam, contract_of
from graphshard.cost import HARDWARE, CostModel, GroupShape
from graphshard.errors import RanksDiffer
from graphshard.graph.ir import PassContext
from graphshard.graph.plan import END, PlannedBucket, PlannedStep
from graphshard.lowering import driver
from graphshard.planner import OwnPlace, simulate
from graphshard.planning.extraction import Scene
from graphshard.planning.named_plan import named_plan
from graphshard.planning.planning import Planning, RegionPlanning
from graphshard.planning.realising import realise
from tests.graph.graphs import Marked, Weight, toy_backward, toy_forward, toy_weights

H100 = HARDWARE["h100"]
SCENE = Scene(CostModel(H100), lambda name: GroupShape(2, 1))
SLOW = replace(SCENE, cost=CostModel(replace(H100, matmul_tflops={"float32": 1e-6}, kernel_us=1e-3), fused=False))
WEIGHTS = toy_weights(3)
ORDINALS = {"": 0, **{f"blocks.{i}": i + 1 for i in range(6)}}


def places_of(ctx: PassContext) -> list[ContractParam]:
    contract_params = {ContractParam(ORDINALS[ref.unit], ref.index, ref.fqn) for ref in ctx.params.values()}
    return sorted(contract_params, key=lambda place: (place.unit, place.index))


def decided(marked: Marked, mode: str = "auto") -> Contract:
    """The contract of a program that this rank plans."""
    planner = RegionPlanning(Planning(SCENE, mode))
    gm = driver.lower(marked.gm, replace(marked.ctx, planner=planner), "test").gm
    return contract_of(gm.graph, planner.latest, places_of(marked.ctx))


def launched(marked: Marked, contract: Contract) -> Any:
    planner = partial(RegionPlanning(Planning(SCENE)), contract=contract)
    gm = driver.lower(marked.gm, replace(marked.ctx, planner=planner), "test").gm
    return contract_of(gm.graph, None, ()).launches


@pytest.mark.parametrize("scene", [SCENE, SLOW], ids=["same times", "other times"])
def test_program_that_was_decided_for_is_realised_step_by_step(scene: Scene) -> None:
    marked = toy_backward(WEIGHTS)
    contract = decided(marked)
    problem, schedule = realise(marked.graph, marked.ctx, scene, contract, None)
    assert named_plan(problem, schedule).steps == contract.steps
    assert contract.steps


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("mode", ["auto", "fsdp2"])
@pytest.mark.parametrize("steps", ["of other nodes", "of these nodes in another order", "none"])
def test_other_graph_launches_the_same_in_order(replicas: int, mode: str, steps: str) -> None:
    weights = toy_weights(3, replicas=replicas)
    marked = toy_backward(weights)
    contract = decided(marked, mode)
    if steps == "of other nodes":
        contract = replace(
            contract, steps=tuple(replace(step, before=f"other_{step.before}") for step in contract.steps)
        )
    else:
        late = tuple(replace(step, before=END) for step in contract.steps)
        contract = replace(contract, steps=() if steps == "none" else late)
    assert launched(marked, contract) == contract.launches


def test_gathers_are_late_where_early_ones_break_the_budget() -> None:
    marked = toy_forward(toy_weights(6))
    contract = replace(decided(marked), steps=())
    early, roomy, late = (
        simulate(*realise(marked.graph, marked.ctx, SCENE, contract, budget)).peak_bytes for budget in (None, 10**9, 1)
    )
    assert late < early == roomy


def test_what_one_graph_sends_alone_or_lacks_is_refused_by_name() -> None:
    more, less = toy_forward(WEIGHTS), toy_forward(WEIGHTS[2:])
    with pytest.raises(RanksDiffer, match=r"the forward of this rank sends the gather of 'blocks\.0\.bias', "):
        realise(more.graph, more.ctx, SCENE, decided(less), None)
    with pytest.raises(RanksDiffer, match=r"the forward of this rank does not send the gather of blocks\.0\.bias, "):
        realise(less.graph, less.ctx, SCENE, decided(more), None)


def test_graph_without_the_collectives_of_the_model_s_own_is_refused() -> None:
    marked = toy_forward(WEIGHTS)
    contract = replace(decided(marked), own=(OwnPlace(1),))
    with pytest.raises(RanksDiffer, match=r"of this rank has 0 collectives of the model's own over .* have 1; want"):
        realise(marked.graph, marked.ctx, SCENE, contract, None)


def test_order_that_a_graph_cannot_keep_is_no_order_of_the_same_program() -> None:
    marked = toy_backward(WEIGHTS)
    contract = decided(marked, "fsdp2")
    with pytest.raises(RanksDiffer, match=r"contract: backward: the gather of .* is needed before the reduce of"):
        realise(marked.graph, marked.ctx, SCENE, replace(contract, buckets=contract.buckets[::-1], steps=()), None)


# -- contracts


def test_contract_survives_its_text() -> None:
    contract = decided(toy_backward(WEIGHTS))
    assert Contract.parse(contract.text()) == contract
    assert (len(contract.params), contract.chosen) == (7, "search")


@pytest.mark.parametrize("text", ["{}", '{"buckets": [], "steps": [], "params": [], "chosen": 1}'])
def test_text_that_is_no_contract_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="contract"):
        Contract.parse(text)


def test_contract_of_a_plan_that_the_graph_does_not_follow_has_its_launches_only() -> None:
    marked = toy_backward(WEIGHTS)
    planner = RegionPlanning(Planning(SCENE))
    planner(marked.graph, marked.ctx)
    fsdp2 = driver.lower(marked.gm, marked.ctx, "test").gm
    found = contract_of(fsdp2.graph, planner.latest, ())
    assert found.steps == ()
    assert found.launches == contract_of(fsdp2.graph, None, ()).launches


def test_contract_of_a_block_is_that_of_an_equal_block() -> None:
    def block(name: str) -> list[Weight]:
        return [Weight(f"{name}.a", (4, 4)), Weight(f"{name}.b", (4,), 1)]

    contract_params = [
        [ContractParam(0, index, weight.fqn) for index, weight in enumerate(block(name))]
        for name in ("blocks.0", "blocks.1")
    ]
    buckets = (PlannedBucket("gather:x", "gather", ("blocks.0.a", "blocks.0.b#2")),)
    contract = Contract(buckets, (PlannedStep("mm", "launch", "gather:x"),), tuple(contract_params[0]))
    other = contract.for_params(contract_params[1])
    assert other.buckets[0].members == ("blocks.1.a", "blocks.1.b#2")
    assert other.for_params(contract_params[0]) == contract
    assert contract.for_params(contract_params[0]) is contract
