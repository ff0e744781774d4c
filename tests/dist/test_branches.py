"""Code that takes another branch with the same parameters: its backward may gather others of them again."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import models
import pytest
import torch
from test_training import BITWISE
from torch import Tensor, nn

from graphshard.agree import consensus
from graphshard.testing import TrainingRun, training_test

pytestmark = pytest.mark.row("X9")

DIM = models.DIM
BRANCHES = ("product", "sum", "squares", "doubled")


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.weight = nn.Parameter(torch.eye(DIM))

    def forward(self, x: Tensor, branch: str) -> Tensor:
        x = x + torch.tanh(self.linear(x))
        if branch == "product":
            return x @ self.weight
        if branch == "sum":  # its backward does not need the weight
            return x + self.weight.sum(0)
        if branch == "squares":
            return x + self.weight.square().sum(0)
        return x @ (self.weight * 2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Branching() for _ in range(2))

    def forward(self, x: Tensor, branch: str) -> Tensor:
        for block in self.blocks:
            x = block(x, branch)
        return x


def train(run: TrainingRun, branches: tuple[tuple[str, ...], ...], plan: str) -> None:
    model = run.shard(Model(), **({} if run.is_reference else {"plan": plan}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, chosen in enumerate(branches):
        (x,) = models.features(step, run.rank)
        loss = model(x, chosen[run.rank % len(chosen)]).tanh().square().mean()
        loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("plan", ["fsdp2", "auto"])
@pytest.mark.parametrize("first", BRANCHES)
@training_test(tolerance=BITWISE, expect_collectives=None)
def test_all_ranks_take_other_branches(run: TrainingRun, first: str, plan: str) -> None:
    train(run, ((first,), *((branch,) for branch in BRANCHES)), plan)


DIFFERENT = {
    "later": (("product",), ("product", "sum"), ("sum", "product"), ("squares",)),
    "at once": (("sum", "product"), ("product", "sum"), ("sum",)),
    "one rank for good": (("product",), *[("sum", "product")] * 4),
}


@pytest.mark.parametrize("case", DIFFERENT)
@training_test(tolerance=BITWISE, expect_collectives=None)
def test_ranks_take_other_branches_than_each_other(run: TrainingRun, case: str) -> None:
    with mock.patch.object(consensus, "PATIENCE_S", 0.3):
        train(run, DIFFERENT[case], "fsdp2")


@training_test(tolerance=BITWISE)
def test_autocast_is_on_in_some_calls(run: TrainingRun) -> None:
    model: Any = run.shard(models.mlps())
    for step in range(4):
        with torch.autocast("cpu", torch.bfloat16) if step % 2 else nullcontext():
            loss = model(*models.features(step, run.rank)).float().square().mean()
        loss.backward()
        run.observe(loss, model)
        model.zero_grad()
