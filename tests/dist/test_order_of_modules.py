"""Modules that run in another order in a later call, as in the order of a batch's keys."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import models
import pytest
import torch
import torch.distributed as dist
from test_training import BITWISE
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.agree import consensus
from graphshard.errors import OrderDiffers
from graphshard.testing import TrainingRun, WorkerPool, training_test
from graphshard.testing.failures import RankFailed

pytestmark = pytest.mark.row("X9")

ORDERS = ((0, 1, 2), (2, 1, 0), (0, 1, 2), (1, 2, 0), (2, 1, 0))
SAID = "modules run in another order than in an earlier call"


class Towers(nn.Module):
    """Three equal blocks, in an order that the caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(models.DIM, models.DIM), nn.Linear(models.DIM, models.DIM)
        self.blocks = nn.ModuleList(models.Mlp() for _ in range(3))

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        x = self.first(x)
        for number in order:
            x = x + self.blocks[number](x)
        out: Tensor = self.last(x)
        return out


@pytest.mark.parametrize("plan", ["fsdp2", "auto"])
@training_test(tolerance=BITWISE)
def test_backward_keeps_the_bits_in_any_order(run: TrainingRun, plan: str) -> None:
    model = run.shard(Towers(), plan=plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, order in enumerate(ORDERS):
        loss = model(*models.features(step, run.rank), order).square().mean()
        loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


def grads_of_all(plain: nn.Module, step: int, orders: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    """What all ranks' gradients are on average, unsharded."""
    model = copy.deepcopy(plain)
    for rank, order in enumerate(orders):
        (model(*models.features(step, rank), order).square().mean() / len(orders)).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def orders_of_ranks(orders: tuple[tuple[tuple[int, ...], ...], ...]) -> graphshard.Report:
    """Trains in the orders of each step, one for each rank."""
    torch.manual_seed(0)
    plain = Towers()
    model: Any = graphshard.compile(
        copy.deepcopy(plain), init_device_mesh("cpu", (dist.get_world_size(),)), backend="aot_eager", deadline_s=20
    )
    with mock.patch.object(consensus, "PATIENCE_S", 1.0):
        for step, own in enumerate(orders):
            model(*models.features(step, dist.get_rank()), own[dist.get_rank()]).square().mean().backward()
            got = [parameter.grad.full_tensor() for parameter in model.parameters()]
            torch.testing.assert_close(got, grads_of_all(plain, step, own))  # sums of other orders
            model.zero_grad()
    return graphshard.report(model)


ALIKE, OTHER = ((0, 1, 2), (0, 1, 2)), ((2, 1, 0), (2, 1, 0))


def other_orders_behind_the_first_change() -> None:
    report = orders_of_ranks((ALIKE, OTHER, ((0, 1, 2), (2, 1, 0)), ((1, 0, 2), (1, 2, 0))))
    assert any(SAID in note for note in report.notes)


def test_ranks_may_then_have_other_orders_than_each_other(two_ranks: WorkerPool) -> None:
    two_ranks.run(other_orders_behind_the_first_change)


def other_order_on_one_rank() -> None:
    orders_of_ranks((ALIKE, ((0, 1, 2), (2, 1, 0))))


def test_other_order_on_one_rank_alone_is_told(two_ranks: WorkerPool) -> None:
    with pytest.raises(RankFailed, match=r"OrderDiffers: contract: backward: the gather .* the same order on every"):
        two_ranks.run(other_order_on_one_rank)


def test_it_is_a_difference_between_ranks() -> None:
    assert issubclass(OrderDiffers, graphshard.RanksDiffer)
