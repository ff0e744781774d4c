"""What forwards do besides computing an output: gradients of inputs, graphs that only read, messages."""

from __future__ import annotations

import functools
import logging
from typing import Any

import models
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_outlining import INDUCTOR
from test_training import BITWISE
from torch import Tensor, nn

import graphshard
from graphshard.testing import TrainingRun, training_test


class Forces(nn.Module):
    """Differentiates an energy by its input inside forward, first order, as models of molecules do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.energy = models.mlps(), nn.Linear(models.DIM, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_(True)
        with torch.enable_grad():
            energy = self.energy(self.layers(x))
            (forces,) = torch.autograd.grad(energy.sum(), x, retain_graph=True)
        return energy, forces.detach()


@training_test(tolerance=BITWISE, allow_eager=("",))
def test_gradient_of_an_input_inside_forward(run: TrainingRun) -> None:
    model = run.shard(Forces())
    for step in range(2):
        energy, forces = model(*models.features(step, run.rank))
        loss = energy.square().mean() + forces.square().mean()
        loss.backward()
        run.observe(loss, model)
        model.zero_grad()


class ReadsBetweenBreaks(nn.Module):
    """A graph that computes nothing reads a parameter for the one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = models.mlps(), nn.Linear(models.DIM, models.DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        torch._dynamo.graph_break()
        weight, bias = self.head.weight, self.head.bias
        torch._dynamo.graph_break()
        return F.linear(x, weight, bias)


@training_test(tolerance=BITWISE, allow_eager=("",))
def test_graph_that_only_reads_parameters(run: TrainingRun) -> None:
    model = run.shard(ReadsBetweenBreaks(), plan="auto")
    for step in range(3):
        with torch.no_grad():
            model(*models.features(step, run.rank))
        loss = model(*models.features(step, run.rank)).square().mean()
        loss.backward()
        run.observe(loss, model)
        model.zero_grad()


class Logger(logging.Logger):
    @functools.lru_cache(None)  # noqa: B019
    def warning_once(self, *args: Any) -> None:
        self.warning(*args)


class LogsOnce(nn.Module):
    """Warns between its layers, as classes of transformers do."""

    def __init__(self, logger: Logger) -> None:
        super().__init__()
        self.layers, self.head = models.mlps(), nn.Linear(models.DIM, models.DIM)
        self.logger = logger

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        self.logger.warning_once("this default will change")
        return self.head(x)


@training_test(tolerance=BITWISE, expect_collectives="equal")
def test_what_is_logged_once_breaks_no_graph_on_ranks_that_log_at_other_levels(run: TrainingRun) -> None:
    logger = Logger("of.a.model", level=(logging.WARNING, logging.ERROR)[run.rank])
    model = run.shard(LogsOnce(logger))
    for step in range(2):
        loss = model(*models.features(step, run.rank)).square().mean()
        loss.backward()
        run.observe(loss, model)
        model.zero_grad()
    if not run.is_reference:
        assert graphshard.report(model).regions == 1


class CountsRanks(nn.Module):
    """Tells the other ranks that it goes on, as `generate` of transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = models.mlps(), nn.Linear(models.DIM, models.DIM)

    def forward(self, x: Tensor) -> Tensor:
        going_on = torch.tensor(1.0)
        dist.all_reduce(going_on)
        return self.head(self.layers(x)) / going_on


@training_test(tolerance=BITWISE, allow_eager=("of a tensor that it makes of a number",))
def test_collective_of_a_number_on_ranks_that_capture_at_different_times(run: TrainingRun) -> None:
    model = run.shard(CountsRanks())
    for step, lengths in enumerate([(4, 4), (4, 4), (4, 5), (4, 6), (5, 3)]):
        loss = model(torch.ones(lengths[run.rank], models.DIM)).square().mean() + step
        loss.backward()
        run.observe(loss, model)
        model.zero_grad()


class Masked(nn.Module):
    """Draws a mask by numpy, as Wav2Vec2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = models.mlps()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x) * torch.from_numpy(np.random.rand(len(x), 1)).float()
        out: Tensor = self.layers(x)
        return out * np.random.uniform(0.5, 1.5)


@training_test(tolerance=BITWISE, allow_eager=("",))
def test_what_numpy_draws_in_forward_are_its_own_numbers(run: TrainingRun) -> None:
    model = run.shard(Masked())
    np.random.seed(run.rank)
    for step in range(3):
        loss = model(*models.features(step, run.rank)).square().mean()
        loss.backward()
        run.observe(loss, model)
        run.note(f"numpy draws {step}", torch.tensor(np.random.rand()))
        model.zero_grad()


@training_test(tolerance=BITWISE)
def test_a_default_device_of_users_is_theirs_alone(run: TrainingRun) -> None:
    model = run.shard(models.Checkpointed())
    for step in range(2):
        inputs = models.tokens(step, run.rank)
        with torch.device("meta"):
            loss = model(*inputs).square().mean()
            loss.backward()
        run.observe(loss, model)
        model.zero_grad()


class Inverse(nn.Module):
    """Its operators have effects: they check that a matrix can be inverted."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(8, 8), nn.Parameter(torch.eye(8) + 0.1 * torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.linalg.solve(self.weight, (self.layer(x) @ torch.linalg.inv(self.weight)).T).T


def check_effects(run: TrainingRun, count: int) -> None:
    model = run.shard(nn.Sequential(*(Inverse() for _ in range(count))))
    for index in range(2):
        loss = model(torch.randn(3 + run.rank, 8, generator=models.generator(index, run.rank))).square().mean()
        loss.backward()
        run.observe(loss, model)
        model.zero_grad()
        with torch.no_grad():
            run.note("evaluated", model(torch.ones(2, 8)))


@pytest.mark.parametrize("count", [1, 4], ids=["one", "equal blocks"])
@training_test(tolerance=BITWISE)
def test_operators_with_effects(run: TrainingRun, count: int) -> None:
    check_effects(run, count)


@pytest.mark.parametrize("count", [1, 4], ids=["one", "equal blocks"])
@training_test(backends=("inductor",), tolerance=INDUCTOR, allow_eager=("with_effects",))
def test_operators_with_effects_whose_tokens_the_compiler_makes(run: TrainingRun, count: int) -> None:
    check_effects(run, count)
