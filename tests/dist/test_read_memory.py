"""What code around graphs has read is emptied behind forward, and full again in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from test_training import BITWISE
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from graphshard.testing import TrainingRun, training_test

ANY = ("",)


class Around(nn.Module):
    """A block with one layer around graphs and one in a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(models.DIM, models.DIM) / 4)
        self.second = nn.Linear(models.DIM, models.DIM)

    @torch.compiler.disable
    def around(self, x: Tensor) -> Tensor:
        return F.relu(x @ self.first)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.around(self.second(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(models.DIM, models.DIM, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rnn(x[None])[0][0]
        return x + out


def blocks(block: Callable[[], nn.Module]) -> Any:
    return nn.Sequential(nn.Linear(models.DIM, models.DIM), *(block() for _ in range(3)))


def twice(model: Any, x: Tensor) -> Tensor:
    return model(x) + model(x * 2)


def in_a_checkpoint(model: Any, x: Tensor) -> Tensor:
    out: Any = checkpoint(model, x, use_reentrant=False)
    return out


def without_gradients_before(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = model(x)
    return model(x + y)


def once(model: Any, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out


CALLS = [once, twice, in_a_checkpoint, without_gradients_before]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("block", [Around, Recurrent])
@training_test(tolerance=BITWISE, allow_eager=ANY)
def test_what_was_emptied_is_full_in_backward(run: TrainingRun, block: Any, call: Any) -> None:
    model = run.shard(blocks(block))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.train(
        model, optimizer, lambda model, run, index: call(model, *models.features(index, run.rank)).square().mean()
    )


class Shared(nn.Module):
    """Calls one block three times, and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.block = nn.Linear(models.DIM, models.DIM), Around()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.before(x)
        for _ in range(3):
            x = self.block(x)
        return {"out": x}


@training_test(tolerance=BITWISE, allow_eager=ANY)
def test_a_block_that_is_called_three_times(run: TrainingRun) -> None:
    model: Any = run.shard(Shared(), units=["block"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.train(model, optimizer, lambda model, run, i: model(*models.features(i, run.rank))["out"].square().mean())


@pytest.mark.parametrize("reshard", [True, False, 2])
@training_test(tolerance=BITWISE, allow_eager=ANY, world_size=4)
def test_backward_twice_through_what_was_emptied(run: TrainingRun, reshard: bool | int) -> None:
    model = run.shard(blocks(Around), reshard_after_forward=reshard)
    for index in range(3):
        loss = model(*models.features(index, run.rank)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        run.observe(loss, model)
        model.zero_grad()


class Apart(models.Scale):
    """Scales behind a layer and a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(models.DIM, models.DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        torch._dynamo.graph_break()
        return self.scaled(x).sin()


@training_test(tolerance=BITWISE, allow_eager=ANY)
def test_one_rank_alone_reads_around_graphs(run: TrainingRun) -> None:
    model: Any = run.shard(blocks(Apart), **({} if run.is_reference else {"deadline_s": 8}))
    for index in range(5):
        for layer in model[1:]:
            layer.is_plain = run.rank == 0 and index >= 2
        loss = model(*models.features(index, run.rank)).square().mean()
        loss.backward()
        run.observe(loss, model)
        model.zero_grad()
