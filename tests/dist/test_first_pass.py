"""A first pass over several regions runs the programs of all later ones: each region is compiled once."""

from __future__ import annotations

from collections.abc import Callable

import models
import pytest
import torch
from test_across_regions import BITWISE, Stages, regions_of, train
from torch import Tensor, nn

import graphshard
from graphshard.testing import TrainingRun, training_test


class Halves(nn.Module):
    """A graph break between two groups of blocks: each region has several whole units."""

    def __init__(self) -> None:
        super().__init__()
        first, second = (nn.ModuleList(models.DecoderBlock() for _ in range(4)) for _ in range(2))
        self.first, self.second = nn.Sequential(*first), nn.Sequential(*second)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        out: Tensor = self.second(x)
        return out


@pytest.mark.parametrize("plan", ["fsdp2", "auto"])
@pytest.mark.parametrize("build", [Halves, Stages])
@training_test(tolerance=BITWISE)
def test_first_pass_over_several_regions_runs_the_programs_of_all(
    run: TrainingRun, build: Callable[[], nn.Module], plan: str
) -> None:
    model = run.shard(build(), **regions_of(run, "model", plan))
    train(run, model, models.sequences)
    if not run.is_reference:
        ran = [program for program in graphshard.report(model).programs if program.where.startswith("region")]
        assert len(ran) == 4 and all(program.runs % 4 == 0 for program in ran), graphshard.report(model)
