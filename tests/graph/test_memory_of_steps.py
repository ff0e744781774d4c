"""Memory that steps take, beside eager FSDP2's: of models that graph breaks cut, and that are read around graphs.

Collectives do nothing here: what a thread of gloo's frees, torch's profiler does not see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.compat.fake import fake_process_group
from graphshard.testing.allocations import Allocated, allocated_by
from graphshard.testing.reference import shard_eager

WIDTH, LAYERS = 256, 6


@pytest.fixture(autouse=True)
def _two_ranks() -> Iterator[None]:
    with fake_process_group(2):
        yield


class Around(nn.Module):
    """A block with one layer around graphs and one in a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    @torch.compiler.disable
    def around(self, x: Tensor) -> Tensor:
        return F.relu(F.linear(x, self.first.weight))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.around(x))


class Frozen(Around):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


class Broken(Around):
    """The same with a graph break between its layers."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x))
        torch._dynamo.graph_break()
        return x + self.second(h)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rnn(x)[0]


def allocated(block: Callable[[], nn.Module], eager: bool) -> tuple[Allocated, Allocated, Allocated]:
    """By a forward, kept until backward; by a step; by one whose graph is kept."""
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(block() for _ in range(LAYERS)))
    mesh, x = init_device_mesh("cpu", (2,)), torch.randn(2, WIDTH, requires_grad=True)
    if eager:
        shard_eager(model, mesh, {}, None)
    else:
        graphshard.compile(model, mesh, backend="aot_eager")

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    for _ in range(3):
        step()

    def keep() -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward(retain_graph=True)
        model.zero_grad()
        return loss

    kept = allocated_by(lambda: model(x).square().mean())
    return kept, allocated_by(step), allocated_by(keep)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at arguments of frames that it skips
@pytest.mark.parametrize("block", [Around, Frozen, Broken, Recurrent])
def test_steps_take_no_more_memory_than_fsdp2s(block: Callable[[], nn.Module]) -> None:
    kept_before, step_before, again_before = allocated(block, eager=True)
    kept, step, again = allocated(block, eager=False)
    unit = sum(param.nbytes for param in block().parameters())
    assert kept.kept <= kept_before.kept + unit / 4
    assert step.peak <= step_before.peak + unit  # a bucket may hold one unit more
    assert again.kept <= again_before.kept + unit / 4
