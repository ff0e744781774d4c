"""Modules that a forward calls with other values than their parameters: fast weights, noise on weights."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from test_training import BITWISE
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call

import graphshard
from graphshard.testing import TrainingRun, WorkerPool, training_test

pytestmark = pytest.mark.row("X9")

DIM = models.DIM


class Model(nn.Module):
    """Calls one of its blocks, which are alike, with three times its weights; no block on a rank that is told so."""

    def __init__(self, whole: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(models.Mlp() for _ in range(4))
        self.whole = whole

    def forward(self, x: Tensor, scaled: int = 2) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            if number != scaled:
                x = block(x)
            elif self.whole:
                x = functional_call(block, {name: 3 * value for name, value in block.named_parameters()}, (x,))
            else:  # one weight of two layers
                name, value = next(iter(block.named_parameters()))
                x = functional_call(block, {name: value * value}, (x,))
        return x


class Noisy(nn.Module):
    """A unit that does so with a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(DIM, DIM), nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = functional_call(self.linear, {"weight": self.linear.weight * self.scale}, (x,))
        return x + torch.tanh(out)


def train(run: TrainingRun, model: nn.Module, *more: Any, **options: Any) -> None:
    sharded: Any = run.shard(model, **options)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    run.train(
        sharded,
        optimizer,
        lambda model, run, step: (
            model(*models.features(step, run.rank), *[each[run.rank] for each in more]).square().mean()
        ),
    )


@pytest.mark.parametrize("whole", [True, False])
@training_test(tolerance=BITWISE, allow_eager=("",))
def test_values_in_the_place_of_parameters_are_used(run: TrainingRun, whole: bool) -> None:
    train(run, Model(whole), units=[])


@training_test(tolerance=BITWISE, allow_eager=("",))
def test_values_in_the_place_of_parameters_on_one_rank(run: TrainingRun) -> None:
    train(run, Model(), (2, -1), units=[])


class Hidden(nn.Module):
    """Does so where Dynamo does not look."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.linear = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self._doubled(torch.tanh(self.first(x)))

    @torch.compiler.disable
    def _doubled(self, x: Tensor) -> Tensor:
        out: Tensor = functional_call(
            self.linear, {name: 2 * value for name, value in self.linear.named_parameters()}, (x,)
        )
        return out


@training_test(tolerance=BITWISE, allow_eager=("",))
def test_values_given_in_code_that_is_not_traced_are_used_and_told_of(run: TrainingRun) -> None:
    train(run, Hidden(), units=[])
    if not run.is_reference:
        said = graphshard.report(run.models[0]).fallbacks
        assert any("other values than its parameters" in line for line in said)


@pytest.mark.parametrize("regions", ["model", "unit"])
@training_test(tolerance=BITWISE, allow_eager=("",))
def test_units_that_give_a_part_of_themselves_other_values(run: TrainingRun, regions: str) -> None:
    train(
        run,
        nn.Sequential(models.Mlp(), *[Noisy() for _ in range(3)]),
        **({} if run.is_reference else {"regions": regions}),
    )


def unit_with_other_values() -> None:
    model: Any = graphshard.compile(Model(), init_device_mesh("cpu", (2,)), backend="aot_eager")
    with pytest.raises(graphshard.UnsupportedModel, match=r"'blocks\.2' with other values than its parameters"):
        model(*models.features(0, 0))


def test_units_get_no_other_values(two_ranks: WorkerPool) -> None:
    two_ranks.run(unit_with_other_values)
