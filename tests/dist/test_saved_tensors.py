"""What a forward saves: through hooks that hand back copies, as those that offload or compress activations; of buffers
and inputs that users write before backward.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import models
import pytest
import torch
from test_outlining import INDUCTOR
from test_training import BITWISE
from torch import Tensor, nn

from graphshard.testing import TrainingRun, training_test


def copying(wanted: bool) -> AbstractContextManager[Any]:
    if not wanted:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.clone(), lambda copy: copy)


class CopiesInSome(nn.Module):
    def __init__(self, layers: nn.Sequential, copies: bool) -> None:
        super().__init__()
        self.layers, self.copies = layers, copies

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            with copying(self.copies and number % 2 == 1):
                x = layer(x)
        return x


@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["all ranks", "one rank"])
@pytest.mark.parametrize("where", ["the call", "some blocks"])
@training_test(tolerance=BITWISE, allow_eager=("",))
def test_copies_of_what_was_saved(run: TrainingRun, where: str, ranks: tuple[int, ...]) -> None:
    copies = run.rank in ranks
    model: Any = run.shard(CopiesInSome(models.mlps(4), copies and where == "some blocks"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(3):
        with copying(copies and where == "the call"):
            loss = model(*models.features(index, run.rank)).square().mean()
        loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


class Queue(nn.Module):
    """Compares with a queue, as MoCo does."""

    def __init__(self, dim: int, copies: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(dim, dim)
        self.register_buffer("queue", torch.randn(dim, 16) * 0.2)
        self.copies = copies

    def forward(self, x: Tensor) -> Tensor:
        queue: Any = self.queue
        return x + (self.layer(x) @ (queue.clone() if self.copies else queue)) @ queue.detach().t().clone()

    def enqueue(self) -> None:
        with torch.no_grad():
            queue: Any = self.queue
            queue[:, :4] = 0.5


class Queues(nn.Module):
    def __init__(self, count: int, copies: bool = True) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Queue(8, copies) for _ in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def enqueue(self) -> None:
        for layer in self.layers:
            layer.enqueue()


@pytest.mark.parametrize("count", [1, 4], ids=["one", "equal blocks"])
@training_test(tolerance=BITWISE)
def test_copies_of_buffers_are_what_they_were(run: TrainingRun, count: int) -> None:
    check_writes_before_backward(run, count)


@training_test(backends=("inductor",), tolerance=INDUCTOR)
def test_so_they_are_where_a_compiler_removes_copies(run: TrainingRun) -> None:
    check_writes_before_backward(run, 4)


def check_writes_before_backward(run: TrainingRun, count: int) -> None:
    model: Any = run.shard(Queues(count))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for index in range(3):
        loss = model(torch.randn(2 + run.rank + index, 8)).square().mean()
        model.enqueue()
        loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("count", [1, 4], ids=["one", "equal blocks"])
@pytest.mark.parametrize("written", ["a buffer", "an input"])
@training_test(backends=("aot_eager", "inductor"), tolerance=INDUCTOR)
def test_a_write_that_would_change_gradients_is_an_error(run: TrainingRun, written: str, count: int) -> None:
    model: Any = run.shard(Queues(count, copies=written == "an input"))
    for step, rows in enumerate((2, 3, 5)):
        x = torch.randn(rows, 4, 8)
        loss = model(x).square().mean()
        if step == 0:
            loss.backward()
            continue
        if written == "an input":
            x.add_(1.0)
        else:
            model.enqueue()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        run.note("loss", loss)
