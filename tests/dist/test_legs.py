"""Graphs that break on one rank in further places than on all: its parts follow the legs of the others' calls."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from test_contract import Blocks, break_in, equal, features, trained

from graphshard.testing import WorkerPool

# Ranks wait for others to break likewise for a quarter of it.
DEADLINE_S = 12.0


def broken_beside_others(who: int, options: dict[str, Any]) -> None:
    """On all ranks, graphs break in the second block; on one of them, later, in those around it, too."""
    rank = dist.get_rank()

    def prepare(model: Any, step: int) -> None:
        break_in(model, (0, 1, 3) if rank == who and step >= 1 else (1,))
        if step == 0:  # other code than that of the block in which all break: compiled when it breaks
            model.layers[3].at_break = torch.compiler.disable(lambda: None)

    got, want, report = trained(Blocks, lambda step: features(step, 4), prepare, deadline_s=DEADLINE_S, **options)
    equal(got, want)
    assert any("graph breaks leave parts" in note for note in report.notes) == (rank == who)


@pytest.mark.parametrize(
    ("who", "options"),
    [(0, {"plan": "auto"}), (1, {"plan": "auto"}), (0, {"plan": "fsdp2"}), (1, {"regions": "unit"})],
)
def test_graph_breaks_on_one_rank_beside_those_of_all(
    two_ranks: WorkerPool, who: int, options: dict[str, Any]
) -> None:
    two_ranks.run(broken_beside_others, who, options)


def broken_alike_later() -> None:
    got, want, report = trained(
        Blocks, lambda step: features(step, 4), lambda model, step: break_in(model, (1,) if step < 2 else (1, 3))
    )
    equal(got, want)
    assert not any("graph breaks leave parts" in note for note in report.notes)


def test_graph_breaks_that_come_later_on_all_ranks_are_theirs(two_ranks: WorkerPool) -> None:
    two_ranks.run(broken_alike_later)


class Torn(nn.Module):
    """A block of two parts on all ranks, and of three where `tears`."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.middle, self.down = (nn.Linear(models.DIM, models.DIM) for _ in range(3))
        self.tears = False

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x)
        torch._dynamo.graph_break()
        inner = self.middle(torch.relu(inner))
        if self.tears:
            torch._dynamo.graph_break()
        return x + self.down(torch.relu(inner))


def torn(who: int) -> None:
    def prepare(model: Any, step: int) -> None:
        for block in model[1:]:
            block.tears = dist.get_rank() == who and step >= 1

    got, want, report = trained(
        lambda: nn.Sequential(nn.LayerNorm(models.DIM), *(Torn() for _ in range(3))),
        lambda step: features(step, 4),
        prepare,
        deadline_s=DEADLINE_S,
    )
    equal(got, want)
    assert any("graph breaks leave parts" in note for note in report.notes) == (dist.get_rank() == who)


@pytest.mark.parametrize("who", [0, 1])
def test_units_that_are_in_parts_on_all_ranks_come_further_apart_on_one(two_ranks: WorkerPool, who: int) -> None:
    two_ranks.run(torn, who)
