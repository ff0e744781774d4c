"""Modules of more classes than Dynamo's recompile limit: it counts what is compiled of one function of the user."""

from __future__ import annotations

from types import FunctionType

import models
import pytest
import torch
from test_across_regions import BITWISE, train
from torch import Tensor, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

import graphshard
from graphshard.runtime.engine import Engine
from graphshard.testing import TrainingRun, training_test

LIMIT = 2


def broken_block(number: int) -> nn.Module:
    """A graph break inside a block of a class of its own, whose code is its own, too."""
    forward = models.BrokenBlock.forward
    code = forward.__code__.replace(co_name=f"forward_{number}")
    own = FunctionType(code, forward.__globals__)
    return type(f"Block{number}", (models.BrokenBlock,), {"forward": own, "encode": own})()


def classes() -> nn.Module:
    return nn.Sequential(*map(broken_block, range(LIMIT + 2)))


class Encoder(nn.Sequential):
    """Calls a method of its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block.encode(x)
        return x


def with_methods(model: nn.Module, mesh: DeviceMesh) -> None:
    for block in model.children():
        fully_shard(block, mesh=mesh)
        register_fsdp_forward_method(block, "encode")
    fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("regions", ["model", "unit"])
@training_test(tolerance=BITWISE)
def test_breaks_in_modules_of_many_classes_stay_below_the_recompile_limit(run: TrainingRun, regions: str) -> None:
    with torch._dynamo.config.patch(recompile_limit=LIMIT):
        blocks = [str(number) for number in range(LIMIT + 2)]
        model = run.shard(classes(), units=blocks, **({} if run.is_reference else {"regions": regions}))
        train(run, model, models.features)
    if not run.is_reference:
        report = graphshard.report(model)
        assert report.regions == 2 * (LIMIT + 2) and not report.captured_again, report
        assert not _debug_get_cache_entry_list(Engine.call.__code__)  # torch would warn of its limit, too


@training_test(tolerance=BITWISE)
def test_breaks_in_methods_of_many_classes_stay_below_the_recompile_limit(run: TrainingRun) -> None:
    with torch._dynamo.config.patch(recompile_limit=LIMIT):
        model = run.shard(Encoder(*classes()), annotate=with_methods)
        train(run, model, models.features)
    if not run.is_reference:
        report = graphshard.report(model)
        assert report.regions == 2 * (LIMIT + 2) and not report.captured_again, report
        assert not _debug_get_cache_entry_list(Engine.call_method.__code__)  # torch would warn of its limit, too
