"""Several backwards of one forward: `retain_graph=True`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from test_models import INDUCTOR
from test_training import BITWISE
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.testing import TrainingRun, WorkerPool, training_test

pytestmark = pytest.mark.row("X7")

DIM = models.DIM
Backwards = Callable[[Any, Tensor, Tensor], None]


class Heads(nn.Module):
    """Two results; the second comes from the last block alone."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.blocks = models.mlps(3)
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.breaks = breaks

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return self.first(x), self.second(x.detach())


def twice(model: Any, x: Tensor, results: Any) -> None:
    loss = results[0].square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def one_by_one(model: Any, x: Tensor, results: Any) -> None:
    results[0].square().mean().backward(retain_graph=True)
    results[1].square().mean().backward()


def inputs_first(model: Any, x: Tensor, results: Any) -> None:
    loss = results[0].square().mean()
    (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    (loss * grad.norm()).backward()


def held_first(model: Any, x: Tensor, results: Any) -> None:
    model.set_requires_gradient_sync(False)
    results[0].square().mean().backward(retain_graph=True)
    model.set_requires_gradient_sync(True)
    (results[0] + results[1]).sum().backward()


def other_outputs(model: Any, x: Tensor, results: Any) -> None:
    results[0].mean().backward(retain_graph=True)
    results[1].mean().backward(retain_graph=True)
    (results[0] * results[1]).mean().backward()


def weighed(model: Any, x: Tensor, results: Any) -> None:
    first, second = (result.square().mean() for result in results)
    (grad,) = torch.autograd.grad(first, x, retain_graph=True)
    (again,) = torch.autograd.grad(first + second, x, retain_graph=True)
    (first + again.norm() / (1 + grad.norm()) * second).backward()


def of_two_calls(model: Any, x: Tensor, results: Any) -> None:
    others = model(x.flip(0))
    first, second = ((found[0] * found[1]).mean() for found in (results, others))
    (first + second).backward(retain_graph=True)
    second.backward(retain_graph=True)
    (first * second).backward()


def two_calls(model: Any, x: Tensor, results: Any) -> None:
    others = model(x.flip(0))
    loss = (results[0] * others[0] + others[1]).mean()
    loss.backward(retain_graph=True)
    results[0].mean().backward(retain_graph=True)
    loss.backward()


def train(run: TrainingRun, model: Any, backwards: Backwards) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        x = models.features(step, run.rank)[0].requires_grad_()
        results = model(x)
        if step % 2 == 0:  # what is compiled for a backward that is the only one serves others, too
            (results[0] + results[1]).square().mean().backward()
        else:
            backwards(model, x, results)
        run.observe(results[0].mean(), model, outputs=x.grad)
        optimizer.step()
        optimizer.zero_grad()


CASES = [twice, one_by_one, other_outputs, weighed, inputs_first, held_first, two_calls]


@pytest.mark.parametrize("backwards", CASES, ids=lambda case: case.__name__)
@training_test(tolerance=BITWISE)
def test_several_backwards_of_a_forward(run: TrainingRun, backwards: Backwards) -> None:
    train(run, run.shard(Heads()), backwards)


@training_test(tolerance=BITWISE)
def test_steps_use_other_outputs(run: TrainingRun) -> None:
    model = run.shard(Heads(), reshard_after_forward=True)
    for step, number in enumerate((0, 1, 0, 1)):
        loss = model(*models.features(step, run.rank))[number].square().mean()
        loss.backward()
        run.observe(loss, model)
        model.zero_grad()


@training_test(backends=["inductor"], tolerance=INDUCTOR)
def test_several_backwards_under_inductor(run: TrainingRun) -> None:
    train(run, run.shard(Heads()), two_calls)


@training_test(tolerance=BITWISE, allow_eager=("",))
def test_several_backwards_behind_graph_breaks(run: TrainingRun) -> None:
    train(run, run.shard(Heads(breaks=True)), two_calls)


@training_test(tolerance=BITWISE, allow_eager=("",))
def test_several_backwards_where_the_graphs_of_one_rank_break(run: TrainingRun) -> None:
    train(run, run.shard(Heads(breaks=run.rank == 1)), of_two_calls)


@training_test(tolerance=BITWISE)
def test_several_backwards_of_what_stays_gathered(run: TrainingRun) -> None:
    train(run, run.shard(Heads(), reshard_after_forward=False), twice)


@training_test(tolerance=BITWISE)
def test_several_backwards_of_regions_of_units(run: TrainingRun) -> None:
    train(run, run.shard(Heads(), **({} if run.is_reference else {"regions": "unit"})), two_calls)


def gradients_of_gradients() -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = graphshard.compile(Heads(), mesh, backend="aot_eager")
    x = models.features(0, torch.distributed.get_rank())[0].requires_grad_()
    with pytest.raises(RuntimeError, match=r"create_graph=True .*behind no graph break"):
        torch.autograd.grad(model(x)[0].sum(), x, create_graph=True)
    model.zero_grad()
    loss = model(x)[0].sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradients_of_gradients_are_refused(two_ranks: WorkerPool) -> None:
    two_ranks.run(gradients_of_gradients)
