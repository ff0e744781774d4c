"""Equal blocks share compiled bodies: as many for many blocks as for few, with the results of eager FSDP2."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import models
import torch
from test_models import INDUCTOR
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.testing import TrainingRun, WorkerPool, training_test


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(models.DIM)
        self.up, self.down = nn.Linear(models.DIM, 2 * models.DIM), nn.Linear(2 * models.DIM, models.DIM)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + hidden


class Stack(nn.Module):
    """Blocks of which the last is wider."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.last = nn.Linear(models.DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.last(x)
        return out


def bodies(layers: int) -> list[tuple[str, int, int]]:
    """Of each program of a step: its direction, its bodies, and the calls of them."""
    torch.manual_seed(0)
    model: Any = graphshard.compile(Stack(layers), init_device_mesh("cpu", (2,)))
    model(*models.features(0, torch.distributed.get_rank())).square().mean().backward()
    codes = [(program.direction, program.code or "") for program in graphshard.report(model).programs]
    return [
        (way, len(re.findall(r"^# body_", code, re.MULTILINE)), len(re.findall(r"= body_\d+\(_read", code)))
        for way, code in codes
    ]


def test_many_blocks_have_no_more_bodies_than_few(two_ranks: WorkerPool) -> None:
    few, many = (two_ranks.run(bodies, layers)[0] for layers in (6, 12))
    for (direction, count, calls), (_, more_count, more_calls) in zip(few, many, strict=True):
        assert more_count <= count + 1, direction  # a bucket may end in the middle of a block
        assert more_calls > calls, direction


@training_test(backends=("inductor",), tolerance=INDUCTOR)
def test_outlined_blocks_accumulate(run: TrainingRun) -> None:
    torch.manual_seed(0)
    model: Any = run.shard(Stack(5), units=[Block])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        model.set_requires_gradient_sync(step % 2 == 1)
        with run.counted(f"step {step}") if step == 3 else nullcontext():
            loss = model(*models.features(step, run.rank)).square().mean()
            loss.backward()
        if step % 2:
            run.observe(loss, model)
            optimizer.step()
            optimizer.zero_grad()
