"""Plans in files: written by one model, replayed by another; refused where the program is not the one planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.plan_file import plan_text
from graphshard.testing import WorkerPool


def compiled(model: nn.Module | None = None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    options.setdefault("backend", "aot_eager")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return graphshard.compile(models.Decoder(layers=2) if model is None else model, mesh, **options)


def step(model: nn.Module, index: int = 0) -> list[Tensor]:
    """Loss, then gradients of this rank's shards."""
    loss = model(*models.tokens(index, dist.get_rank())).square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad.to_local().clone() for parameter in model.parameters())]


def graphs(model: nn.Module) -> list[tuple[str, str]]:
    return [(program.direction, program.ir) for program in graphshard.report(model).programs]


def saved(path: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = compiled(models.Decoder(layers=2), **options)
    model.values = step(model)
    graphshard.save_plan(model, path)
    dist.barrier()  # others read what rank 0 has written
    return model


def replays(path: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    first = saved(path, **options)
    torch.manual_seed(0)
    second = compiled(models.Decoder(layers=2), **options | {"plan": path})
    values = step(second)
    assert graphs(second) == graphs(first)
    assert [program.decision.plan for program in graphshard.report(second).programs if program.decision] == [
        program.decision.plan for program in graphshard.report(first).programs if program.decision
    ]
    assert all(torch.equal(a, b) for a, b in zip(values, first.values, strict=True))
    assert graphshard.report(second).notes == []
    written = Path(path).read_bytes()
    dist.barrier()
    graphshard.save_plan(second, path)
    dist.barrier()
    assert Path(path).read_bytes() == written


@pytest.mark.parametrize("options", [{}, {"plan": "fsdp2"}, {"backend": "inductor"}, {"regions": "unit"}], ids=str)
def test_replay_gives_the_same_graphs_and_bits(two_ranks: WorkerPool, tmp_path: Path, options: dict[str, Any]) -> None:
    two_ranks.run(replays, str(tmp_path / "plan.json"), options)
