"""Programs that Inductor compiles late, behind Dynamo's guards: for sizes as symbols, or each for its own."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from test_outlining import INDUCTOR
from test_training import BITWISE
from torch import Tensor, nn

import graphshard
from graphshard.testing import TrainingRun, training_test

DIM = 8
# Inductor of torch 2.11 takes no size of a convolution for granted; one with a bias it cannot lower.
TAKES_SIZES = torch.__version__ >= "2.12"


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, DIM), nn.Conv1d(DIM, DIM, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(self.norm(x)).relu()


class Broken(Convolution):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        torch._dynamo.graph_break()
        return super().forward(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.transpose(1, 2)).chunk(3, dim=-1)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(attended).transpose(1, 2)


def several_lengths(run: TrainingRun, block: type[nn.Module], **kwargs: Any) -> str:
    """Trains with others in each step, and on each rank; returns the report."""
    model = run.shard(nn.Sequential(nn.Conv1d(3, DIM, 1, bias=False), block(), block()), **kwargs)

    def loss(model: nn.Module, run: TrainingRun, index: int) -> Tensor:
        inputs = torch.randn(2, 3, 12 + 3 * index + run.rank, generator=models.generator(index, run.rank))
        out: Tensor = model(inputs)
        return out.square().mean()

    run.train(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, steps=4)
    return "" if run.is_reference else str(graphshard.report(model))


@pytest.mark.parametrize("block", [Convolution, Attention])
@training_test(backends=("inductor",), tolerance=INDUCTOR)
def test_each_size_is_captured_by_itself_where_a_program_is_for_one_alone(
    run: TrainingRun, block: type[nn.Module]
) -> None:
    said = several_lengths(run, block)
    if not run.is_reference:
        assert ("a program is compiled for sizes with" in said) == (block is Convolution and TAKES_SIZES)


@training_test(backends=("inductor",), tolerance=INDUCTOR)
def test_region_is_captured_for_one_size_alone_behind_one_that_is_for_all(run: TrainingRun) -> None:
    said = several_lengths(run, Convolution, regions="unit")
    assert run.is_reference or "each size is captured by itself" in said or not TAKES_SIZES


@training_test(backends=("inductor",), tolerance=INDUCTOR, allow_eager=("",))
def test_program_behind_a_graph_break_that_is_for_other_sizes_runs_as_it_is(run: TrainingRun) -> None:
    said = several_lengths(run, Broken)
    assert (
        run.is_reference or ("runs as it is" in said and "each size is captured by itself" in said) or not TAKES_SIZES
    )


@training_test(backends=("inductor",), tolerance=INDUCTOR, allow_eager=("a program is compiled for sizes with",))
def test_backward_of_another_size_than_the_first_runs_as_it_is(run: TrainingRun) -> None:
    model = run.shard(nn.Sequential(*(nn.Conv1d(DIM, DIM, 3, padding=1, bias=False) for _ in range(2))))

    def loss(model: nn.Module, run: TrainingRun, index: int) -> Tensor:
        draw = models.generator(index, run.rank)
        # The last one, whose backward is the first, is longer than the one that is captured.
        lengths = [12] if index == 0 else [15 + 3 * at + index + run.rank for at in range(2)]
        outs = [model(torch.randn(2, DIM, length, generator=draw)) for length in lengths]
        return torch.stack([out.square().mean() for out in outs]).sum()

    run.train(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, steps=4)
    if not run.is_reference:
        fallbacks = graphshard.report(model).fallbacks
        assert [line for line in fallbacks if "runs as it is" in line] or not TAKES_SIZES


@training_test(backends=("inductor",), tolerance=INDUCTOR)
def test_batch_without_rows_on_one_rank(run: TrainingRun) -> None:
    model = run.shard(nn.Sequential(Attention(), Attention()))

    def loss(model: nn.Module, run: TrainingRun, index: int) -> Tensor:
        rows = 0 if index == 2 * run.rank else 3 + index  # on this rank in the first step, or the third
        out: Tensor = model(torch.randn(rows, DIM, 5, generator=models.generator(index, run.rank)))
        return out.square().sum()

    run.train(model, torch.optim.SGD(model.parameters(), lr=0.01), loss, steps=4)


class Jagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.unflatten(-1, (2, -1)).transpose(1, 2).transpose(1, 2).flatten(-2)


def check_jagged(run: TrainingRun) -> None:
    model = run.shard(Jagged())

    def loss(model: nn.Module, run: TrainingRun, index: int) -> Tensor:
        draw = models.generator(index, run.rank)
        rows = [torch.randn(2 + index + run.rank + row, DIM, generator=draw) for row in range(3)]
        out: Tensor = model(torch.nested.nested_tensor(rows, layout=torch.jagged)).values()
        return out.square().mean()

    run.train(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, steps=3)


@training_test(tolerance=BITWISE)
def test_jagged_tensors(run: TrainingRun) -> None:
    check_jagged(run)


@training_test(backends=("inductor",), tolerance=INDUCTOR)
def test_lengths_of_jagged_tensors_are_no_sizes(run: TrainingRun) -> None:
    check_jagged(run)
