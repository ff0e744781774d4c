"""Ranks expect that the leader decides what they would: then they lower once; where they are wrong, once more."""

from __future__ import annotations

from typing import Any

import models
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.lowering.driver import after_lowering
from graphshard.testing import WorkerPool


def tries(sizes: tuple[int, ...]) -> tuple[int, int]:
    """How often this rank lowers in a step, and how many programs come of it."""
    torch.manual_seed(0)
    model: Any = graphshard.compile(
        models.mlps(3), init_device_mesh("cpu", (dist.get_world_size(),)), backend="aot_eager"
    )
    lowered: list[str] = []
    with after_lowering(lambda _, direction: lowered.append(direction)):
        model(torch.randn(sizes[dist.get_rank()], models.DIM)).square().mean().backward()
    return len(lowered), len(graphshard.report(model).programs)


def test_rank_that_expects_what_is_decided_lowers_once(two_ranks: WorkerPool) -> None:
    assert two_ranks.run(tries, (4, 4)) == [(2, 2), (2, 2)]


def test_rank_that_expects_something_else_is_wrong_once(two_ranks: WorkerPool) -> None:
    alike, (more, programs) = two_ranks.run(tries, (4, 4000))
    assert alike == (2, 2)
    assert (more, programs) == (3, 2)
