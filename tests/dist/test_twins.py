"""Dynamo traces two of blocks that are alike, and all of those that are not: with the results of eager FSDP2."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import models
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from twin_changes import CHANGES
from twin_models import ALIKE, Stack
from twin_others import OTHER, Drawing, Drawn, Three, WithScale

import graphshard
from graphshard.testing import TrainingRun, WorkerPool, training_test

lists_stay = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="FSDP2 of torch 2.11 calls blocks with copies of lists"
)


def twins_of(model: nn.Module) -> int:
    return graphshard.report(model).twins


def train(
    run: TrainingRun,
    model: nn.Module,
    steps: int = 2,
    change: Callable[[nn.Module, int], None] = lambda *_: None,
    inputs: Callable[[int, int], tuple[Tensor, ...]] = models.features,
) -> None:
    run.shard(model, units=[type(model.blocks[0])])  # type: ignore[index]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss_of(model: nn.Module, run: TrainingRun, step: int) -> Tensor:
        torch.manual_seed(step)
        change(model, step)
        loss: Tensor = model(*inputs(step, run.rank)).square().mean()
        return loss

    run.train(model, optimizer, loss_of, steps=steps)
    run.note("buffers", dict(model.named_buffers()))


@pytest.mark.parametrize("name", ALIKE)
@training_test()
def test_one_of_blocks_that_are_alike_is_traced(run: TrainingRun, name: str) -> None:
    build, twins = ALIKE[name]
    train(run, model := build())
    assert run.is_reference or twins_of(model) == twins


@pytest.mark.parametrize("name", ["plain", "checkpointed, and inside", "numbers, sizes, texts, None"])
@training_test()
def test_sizes_may_be_symbolic(run: TrainingRun, name: str) -> None:
    build, twins = ALIKE[name]
    train(run, model := build(), 3, inputs=models.growing_features)
    assert run.is_reference or twins_of(model) == 2 * twins


def growing_to_a_square(index: int, rank: int) -> tuple[Tensor]:
    """Two sizes that differ, until they do not."""
    rows, columns = ((4, 8), (5, 9), (7, 7))[index]
    return (torch.randn(rows, columns, models.DIM, generator=models.generator(index, rank)),)


@training_test()
def test_symbolic_sizes_may_be_equal(run: TrainingRun) -> None:
    train(run, model := Stack(), 3, inputs=growing_to_a_square)
    assert run.is_reference or twins_of(model) == 6


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[lists_stay] if name == "filling a list" else []) for name in OTHER]
)
@training_test()
def test_blocks_that_do_something_else_are_all_traced(run: TrainingRun, name: str) -> None:
    train(run, model := OTHER[name]())
    assert run.is_reference or twins_of(model) == 0


@pytest.mark.parametrize("name", CHANGES)
@training_test()
def test_one_block_may_change(run: TrainingRun, name: str) -> None:
    build, change = CHANGES[name]
    model = build()

    def change_one(model: Any, step: int) -> None:
        if step:
            change(model.blocks[2 * (step - 1)])

    train(run, model, 3, change_one)
    assert run.is_reference or twins_of(model) >= 3


@training_test()
def test_blocks_that_are_alike_on_one_rank_only(run: TrainingRun) -> None:
    model = Stack()
    if run.rank == 1:
        for block in model.blocks:
            block.remark = [object()]
    train(run, model)
    assert run.is_reference or twins_of(model) == (3 if run.rank == 0 else 0)


def twins_on_one_rank() -> int:
    with mock.patch.dict(os.environ, {"GRAPHSHARD_TWINS": str(torch.distributed.get_rank())}):
        model: Any = graphshard.compile(Stack(), init_device_mesh("cpu", (2,)), backend="aot_eager")
        model(*models.features(0, 0)).sum().backward()
    return twins_of(model)


def test_twins_are_there_where_they_are_asked_for(two_ranks: WorkerPool) -> None:
    assert two_ranks.run(twins_on_one_rank) == [0, 3]


def notes_of_twins(build: Callable[[], nn.Module]) -> tuple[int, list[str]]:
    model: Any = graphshard.compile(build(), init_device_mesh("cpu", (2,)), backend="aot_eager")
    model(*models.features(0, 0)).sum().backward()
    return twins_of(model), [note for note in graphshard.report(model).notes if "one by one" in note]


def notes_without_twins(name: str) -> tuple[int, list[str]]:
    return notes_of_twins(OTHER[name])


def test_two_traces_that_differ_are_noticed(two_ranks: WorkerPool) -> None:
    why = "blocks are captured one by one: two that look alike are traced otherwise"
    assert two_ranks.run(notes_of_twins, partial(Stack, Drawing)) == [(0, [why])] * 2


def test_blocks_have_twins_beside_two_traces_that_differ(two_ranks: WorkerPool) -> None:
    assert two_ranks.run(notes_of_twins, Drawn) == [(3, [])] * 2


def test_nothing_is_said_of_blocks_that_are_too_few_for_twins(two_ranks: WorkerPool) -> None:
    assert two_ranks.run(notes_of_twins, Three) == [(0, [])] * 2


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("filling a list", ("they are called with more than tensors, None, ",)),
        # Of torch 2.15's traces the second is found first.
        ("an item set between them", ("each is called otherwise, ", "two that look alike are traced otherwise")),
    ],
)
def test_why_blocks_that_are_alike_have_no_twins_is_said(
    two_ranks: WorkerPool, name: str, why: tuple[str, ...]
) -> None:
    for twins, (note, *more) in two_ranks.run(notes_without_twins, name):
        assert twins == 0 and note.removeprefix("blocks are captured one by one: ").startswith(why) and not more


@training_test()
def test_call_may_bring_what_a_block_has(run: TrainingRun) -> None:
    model = WithScale()

    def inputs(step: int, rank: int) -> tuple[Tensor, Tensor]:
        scale: Any = model.blocks[3].scale if step == rank + 1 else torch.ones(models.DIM)
        return (*models.features(step, rank), scale)

    train(run, model, 4, inputs=inputs)
    assert run.is_reference or twins_of(model) == 3


def twins_with_regions_of_units() -> tuple[int, list[str]]:
    with mock.patch.dict(os.environ, {"GRAPHSHARD_TWINS": "1"}):
        model: Any = graphshard.compile(Stack(), init_device_mesh("cpu", (2,)), backend="aot_eager", regions="unit")
    model(*models.features(0, 0)).sum().backward()
    return twins_of(model), graphshard.report(model).fallbacks


def test_regions_of_units_say_that_they_have_no_twins(two_ranks: WorkerPool) -> None:
    said = "GRAPHSHARD_TWINS is ignored: with regions='unit' each block is a region"
    assert two_ranks.run(twins_with_regions_of_units) == [(0, [said])] * 2
