"""`generate`, registered as a forward: the model is called for each token, by code that is not captured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import models
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_training import BITWISE
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

import graphshard
from graphshard.runtime import generating
from graphshard.testing import TrainingRun, training_test


class Generating(models.Decoder):
    """Draws the likeliest tokens until all ranks have as many as they want, as transformers' `synced_gpus`."""

    def generate(self, tokens: Tensor, count: int) -> Tensor:
        tokens = tokens.to(next(self.parameters()).device)
        end = tokens.shape[1] + count
        while self.some_rank_goes_on(tokens.shape[1] < end):
            drawn = self(tokens)[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, drawn], dim=1)
        return tokens[:, :end]

    def some_rank_goes_on(self, goes_on: bool) -> bool:
        flag = torch.tensor(1.0 if goes_on else 0.0)
        dist.all_reduce(flag)
        return bool(flag.item())


def with_generate(model: nn.Module, mesh: DeviceMesh) -> None:
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "generate")


@training_test(tolerance=BITWISE)
def test_generate_between_steps_of_ranks_with_other_prompts_and_lengths(run: TrainingRun) -> None:
    model: Any = run.shard(Generating(layers=3), annotate=with_generate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        loss = model(*models.tokens(step, run.rank)).square().mean()
        loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()
        prompt = models.tokens(10 + step, run.rank)[0][:, : 2 + 3 * run.rank]
        with torch.no_grad():
            drawn = model.generate(prompt, 2 + step + run.rank)
        run.observe(loss, model, outputs=[drawn.float()])
    if not run.is_reference:
        report = graphshard.report(model)
        assert report.regions == 3  # forward of a step; of tokens, of one length and of any


class ByLayers(models.Decoder):
    """Reads parameters, and calls what is inside the model, but not the model."""

    def generate(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens).to(self.head.weight.dtype)
        for layer in self.layers:
            h = layer(h)
        return F.linear(self.norm(h), self.head.weight).argmax(-1)


@pytest.mark.parametrize("reshard", [None, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@training_test(tolerance=BITWISE)
def test_generate_that_calls_layers_alone_in_low_precision(
    run: TrainingRun, mode: Callable[[], Any], reshard: bool | None
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model: Any = run.shard(ByLayers(layers=2), mp_policy=policy, reshard_after_forward=reshard)
    register_fsdp_forward_method(model, "generate")
    for step in range(2):
        loss = model(*models.tokens(step, run.rank)).float().square().mean()
        loss.backward()
        with mode():
            drawn = model.generate(models.tokens(10 + step, run.rank)[0][:, : 2 + run.rank])
        run.observe(loss, model, outputs=[drawn.clone().float()])
        model.zero_grad()


@training_test(tolerance=BITWISE)
def test_generate_that_fails_leaves_the_model_sharded(run: TrainingRun) -> None:
    model: Any = run.shard(Generating(layers=2), annotate=with_generate)
    loss = model(*models.tokens(0, run.rank)).square().mean()
    loss.backward()
    if not run.is_reference:  # eager FSDP2 needs reset_iter_state() after it
        with pytest.raises(IndexError):
            model.generate(torch.full((1, 2), 10**6), 1)
    run.observe(loss, model)


@training_test(tolerance=BITWISE)
def test_generate_that_was_taken_before_eager_calls_generate_there(run: TrainingRun) -> None:
    model: Any = run.shard(Generating(layers=2), annotate=with_generate)
    loss = model(*models.tokens(0, run.rank)).square().mean()
    loss.backward()
    taken = model.generate
    with torch.no_grad(), nullcontext() if run.is_reference else graphshard.eager(model):
        drawn = taken(models.tokens(1, run.rank)[0], 1)
    run.observe(loss, model, outputs=[drawn.float()])


def test_units_of_a_module_are_gathered_in_one_order_on_all_ranks() -> None:
    """A process group each, as of experts on a mesh of their own, begins to be used in it."""
    units: list[Any] = [MagicMock(reshard_after_forward=True) for _ in range(8)]
    units = [units[place] for place in (5, 2, 7, 0, 6, 3, 1, 4)]
    holdings: Any = MagicMock()
    holdings.residency.pinned, holdings.forward.called = frozenset(units[:1]), set()
    holdings.shards.units_of = lambda module: units
    generating.generate(MagicMock(), holdings, nn.Module(), lambda: None, lambda: None)
    holdings.gathers.unshard.assert_called_once_with(units[1:])
    holdings.gathers.reshard.assert_called_once_with(units[1:])
