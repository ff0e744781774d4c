"""Models that nobody holds any more are freed: what Dynamo keeps of them does not hold them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import models
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.testing import WorkerPool

Made = tuple[nn.Module, tuple[Tensor, ...]]


def compiled(model: nn.Module, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return graphshard.compile(model, mesh, **options)


class Broken(nn.Module):
    """A unit of which two graphs use parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(models.DIM, models.DIM)
        self.second = nn.Linear(models.DIM, models.DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return torch.tanh(self.second(x))


def broken(backend: str) -> Made:
    return compiled(Broken(), backend=backend), models.features(0, torch.distributed.get_rank())


def whole(backend: str) -> Made:
    return compiled(models.Decoder(layers=2), backend=backend), models.tokens(0, torch.distributed.get_rank())


def over_fewer_ranks_behind_forward(backend: str) -> Made:
    model = compiled(models.Decoder(layers=2), reshard_after_forward=2, backend=backend)
    return model, models.tokens(0, torch.distributed.get_rank())


def deleted_models(*makers: Callable[[str], Made]) -> None:
    for backend, make in product(("aot_eager", "eager"), makers):
        dead = []
        for _ in range(2):
            model, args = make(backend)
            for _ in range(2):
                model(*args).square().mean().backward()
            dead.append(weakref.ref(model))
            del model
            gc.collect()
        assert [ref() for ref in dead] == [None, None], make.__name__


def test_deleted_models_are_freed(two_ranks: WorkerPool) -> None:
    two_ranks.run(deleted_models, whole, broken)


def test_deleted_models_of_four_ranks_are_freed(four_ranks: WorkerPool) -> None:
    four_ranks.run(deleted_models, over_fewer_ranks_behind_forward)
