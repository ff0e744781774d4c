"""What every pass promises: `decide` only reads, an edit is plain data, a second run decides nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from graphshard.fsdp2.settings import UnitSettings
from graphshard.graph.printer import format_graph
from graphshard.passes import JOINT, PROGRAM, Pass
from tests.graph.graphs import BF16, F16, F32, GraphBuilder, Marked, Weight, toy_backward, toy_forward, toy_weights

PASSES = [pytest.param(step, id=step.name) for step in {step.name: step for step in (*JOINT, *PROGRAM)}.values()]


def unmarked() -> Marked:
    build = GraphBuilder("backward")
    x, tangent = build.input("x", [3]), build.input("tangents_1", [3])
    return build.finish(build.call(torch.ops.aten.mul.Tensor, x, tangent), None)


def tied() -> Marked:
    weight = Weight("embedding", (4, 3))
    build = GraphBuilder("inference")
    x = build.input("x", [2, 3])
    logits = build.call(torch.ops.aten.mm.default, x, build.call(torch.ops.aten.t.default, build.unshard(weight)))
    return build.finish(build.call(torch.ops.aten.mm.default, logits, build.unshard(weight)))


GRAPHS: list[Callable[[], Marked]] = [
    lambda: toy_forward(toy_weights()),
    lambda: toy_forward(toy_weights(world_size=1), "inference"),
    lambda: toy_backward(toy_weights(world_size=3, param_dtype=BF16, reduce_dtype=F16)),
    lambda: toy_backward(toy_weights()).flagged(
        unreduced=frozenset({"head_shard"}), added=(("blocks_0_bias_shard", F32), ("blocks_1_weight_shard", F32))
    ),
    lambda: toy_backward(toy_weights()).flagged(undefined=frozenset({"tangents_1"})),
    lambda: toy_backward(toy_weights()).flagged(inputs_only=True),
    lambda: toy_forward(toy_weights()).flagged(resident=("head_shard",), kept=("blocks_0_weight_shard",)),
    lambda: toy_forward(toy_weights(world_size=4, post_forward=(2, "1"))).flagged(
        rejoined=("head_shard",), kept=("head_shard",), resharded=("blocks_0_weight_shard",)
    ),
    lambda: toy_backward(toy_weights(replicas=2, reduce_dtype=BF16)),
    lambda: toy_backward(toy_weights(replicas=2, reduce_dtype=BF16)).flagged(
        partial=("head_shard",),
        units=(("", UnitSettings(all_reduce=False)), ("blocks.0", UnitSettings(divide_factor=3.0, force_sum=True))),
    ),
    lambda: toy_backward(toy_weights(3)).flagged(units=(("", UnitSettings(backward_prefetch=("blocks.1",))),)),
    lambda: toy_backward(toy_weights(0)),
    tied,
]


def snapshot(graph: Graph) -> tuple[str, list[list[Any]]]:
    return format_graph(graph), [sorted(node.meta) for node in graph.nodes]


def until(step: Pass, marked: Marked) -> None:
    """Runs the passes before `step`."""
    for earlier in PROGRAM:
        if earlier.name == step.name:
            return
        if (edit := earlier.decide(marked.graph, marked.ctx)) and step in PROGRAM:
            earlier.apply(marked.graph, edit)


@pytest.mark.parametrize("step", PASSES)
def test_passes_decide_nothing_without_markers(step: Pass) -> None:
    marked = unmarked()
    assert not step.decide(marked.graph, marked.ctx)


@pytest.mark.parametrize("make", GRAPHS)
@pytest.mark.parametrize("step", PASSES)
def test_passes_decide_only_reads_and_once(step: Pass, make: Callable[[], Marked]) -> None:
    marked = make()
    until(step, marked)
    before = snapshot(marked.graph)
    edit = step.decide(marked.graph, marked.ctx)
    assert snapshot(marked.graph) == before
    assert edit == step.decide(marked.graph, marked.ctx)
    step.apply(marked.graph, edit)
    marked.graph.lint()
    assert not step.decide(marked.graph, marked.ctx)


@pytest.mark.parametrize("make", GRAPHS)
def test_passes_edits_are_frozen_data(make: Callable[[], Marked]) -> None:
    marked = make()
    for step in (*JOINT, *PROGRAM):
        edit = step.decide(marked.graph, marked.ctx)
        assert dataclasses.is_dataclass(edit)
        assert type(edit).__dataclass_params__.frozen  # type: ignore[attr-defined]
        hash(edit)  # tuples and names all the way down
        assert not any(isinstance(value, Node) for value in _leaves(dataclasses.astuple(edit)))  # type: ignore[arg-type]
        step.apply(marked.graph, edit)


def _leaves(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, tuple) else [value]


def test_passes_have_names_of_their_own() -> None:
    for steps in (JOINT, PROGRAM):
        assert len({step.name for step in steps}) == len(steps)
    for step in (*JOINT, *PROGRAM):
        assert step.decide.__module__ == f"graphshard.passes.{step.name}"
