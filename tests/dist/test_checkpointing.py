"""Activation checkpointing of every kind, with units inside and around what is recomputed."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import models
import pytest
import torch
from test_entry_points import SUMMED
from test_training import BITWISE, loss_of
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import graphshard
from graphshard.testing import TrainingRun, training_test


def unit_per_block(model: Any, mesh: DeviceMesh, reshard: bool) -> None:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def list_units(model: Any, mesh: DeviceMesh, reshard: bool) -> None:
    """Two modules in one unit; the embedding's backward does not need its weight."""
    fully_shard(model.embed, mesh=mesh, reshard_after_forward=reshard).set_unshard_in_backward(False)
    fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=reshard)
    unit_per_block(model, mesh, reshard)


def list_unit_of_tied_weights(model: Any, mesh: DeviceMesh, reshard: bool) -> None:
    fully_shard([model.embed, model.head], mesh=mesh, reshard_after_forward=reshard)
    unit_per_block(model, mesh, reshard)


GROUPINGS = {"block": unit_per_block, "list": list_units, "tied list": list_unit_of_tied_weights}


def checkpointed(kind: str, tied: bool = False) -> nn.Module:
    if kind == "function":
        return models.Checkpointed(layers=2, tied=tied)
    model = models.Decoder(layers=2, tied=tied)
    for i, layer in enumerate(model.layers):
        if kind == "wrapper":
            model.layers[i] = checkpoint_wrapper(layer)
        else:
            composable_checkpoint(layer)
    return model


@pytest.mark.row("S16")
@pytest.mark.parametrize(
    ("kind", "grouping", "reshard"),
    [
        ("function", "list", False),
        ("function", "tied list", True),
        ("wrapper", "block", False),
        ("composable", "list", True),
    ],
)
@training_test(tolerance=BITWISE)
def test_checkpointed_blocks(run: TrainingRun, kind: str, grouping: str, reshard: bool) -> None:
    annotate = functools.partial(GROUPINGS[grouping], reshard=reshard)
    model = run.shard(checkpointed(kind, tied=grouping == "tied list"), annotate=annotate)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.train(model, optimizer, loss_of, counted=True)


class CheckpointedInside(nn.Module):
    """Parts of a unit's forward are recomputed, and the unit gathers once for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.block = models.DecoderBlock()
        self.scale = nn.Parameter(torch.ones(models.DIM))

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.block.down(torch.tanh(self.block.up(self.block.norm2(x)))) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda y: y + self.block.attention(self.block.norm1(y)), x, use_reentrant=False)
        return x + checkpoint(self.feed_forward, x, use_reentrant=False)


@pytest.mark.row("S16")
@pytest.mark.parametrize("reshard", [True, False])
@training_test(tolerance=BITWISE)
def test_parts_of_a_unit_are_recomputed(run: TrainingRun, reshard: bool) -> None:
    model = nn.Sequential(nn.Embedding(models.VOCAB, models.DIM), CheckpointedInside(), CheckpointedInside())
    run.shard(model, units=[CheckpointedInside], reshard_after_forward=reshard)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.train(model, optimizer, loss_of, counted=True)


class AsksForDtype(nn.Module):
    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(wide, out)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.to(next(self.parameters()).dtype)).float()
        return out


class AskedInside(nn.Module):
    """A part of it is recomputed in backward, around a graph break, and asks for parameters and their dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = AsksForDtype(models.DIM, 2 * models.DIM), AsksForDtype(2 * models.DIM, models.DIM)

    def part(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        torch._dynamo.graph_break()
        hidden = hidden.to(next(self.parameters()).dtype) * self.up.linear.bias
        out: Tensor = self.down(hidden)
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + checkpoint(self.part, x, use_reentrant=False)
        return out


@pytest.mark.skipif(
    not models.ROUNDS_GRADIENTS, reason="torch 2.15 reduces some gradients without rounding them to param_dtype"
)
@pytest.mark.parametrize("regions", ["model", "unit"])
@training_test(tolerance=BITWISE, allow_eager=("",))
def test_what_is_recomputed_around_a_break_sees_gathered_parameters(run: TrainingRun, regions: str) -> None:
    blocks = nn.Sequential(*(AskedInside() for _ in range(3)))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = run.shard(blocks, units=[AskedInside], regions=regions, mp_policy=policy)
    for batch in (2, 3, 2):
        loss = model(torch.randn(batch, models.DIM)).square().mean()
        loss.backward()
        run.observe(loss, model)
        model.zero_grad()


def save_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(models.Decoder):
    def forward(self, x: Tensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
        h = self.embed(x)
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False, context_fn=contexts)
        logits: Tensor = self.head(self.norm(h))
        return logits


@pytest.mark.row("S16")
@pytest.mark.parametrize("reshard", [True, False])
@training_test(tolerance=BITWISE)
def test_selective_checkpointing(run: TrainingRun, reshard: bool) -> None:
    model = run.shard(Selective(layers=2), reshard_after_forward=reshard)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.train(model, optimizer, loss_of, counted=True)


class SelectiveParts(Selective):
    """Some of what a selective checkpoint recomputes is no part of a graph."""

    def __init__(self, recurrent: bool) -> None:
        super().__init__(layers=3)
        self.layers[1] = nn.LSTM(models.DIM, models.DIM, batch_first=True) if recurrent else self.layers[1]

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
        h = self.embed(x)
        for layer in self.layers:
            torch._dynamo.graph_break()
            h = checkpoint(self.through, layer, h, use_reentrant=False, context_fn=contexts)
        logits: Tensor = self.head(self.norm(h))
        return logits

    def through(self, layer: nn.Module, h: Tensor) -> Tensor:
        out = layer(h)
        return torch.tanh(out[0] if isinstance(out, tuple) else out) + h


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("regions", ["model", "unit"])
@training_test(tolerance=BITWISE, allow_eager=("",))
def test_selective_checkpoints_around_parts(run: TrainingRun, regions: str, recurrent: bool) -> None:
    model = run.shard(SelectiveParts(recurrent), regions=regions)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.train(model, optimizer, loss_of)
    if not run.is_reference:
        assert "a selective checkpoint is around compiled regions" in str(graphshard.report(model))


# --- preference optimization: two forwards, one backward


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(models.DIM, 2 * models.DIM), nn.Linear(2 * models.DIM, models.DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))) * 1.0


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(models.DIM), nn.RMSNorm(models.DIM)
        self.attention, self.feed_forward = models.Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Policy(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(models.VOCAB, models.DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(models.DIM, models.VOCAB, bias=False)
        if kind == "composable":
            for layer in self.layers:
                composable_checkpoint(layer)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False) if self.kind == "function" else layer(h)
        logits: Tensor = self.head(h)
        return logits


@pytest.mark.row("S22")
@pytest.mark.parametrize(("kind", "reshard"), [("function", True), ("function", False), ("composable", True)])
@training_test(tolerance=SUMMED)
def test_nested_units_in_two_forwards_and_one_backward(run: TrainingRun, kind: str, reshard: bool) -> None:
    def annotate(model: Any, mesh: DeviceMesh) -> None:
        for layer in model.layers:
            fully_shard(layer.attention, mesh=mesh, reshard_after_forward=reshard)
            fully_shard(layer.feed_forward, mesh=mesh, reshard_after_forward=reshard)
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)

    model = run.shard(Policy(kind), annotate=annotate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(3):
        with run.counted(f"step {index}") if index else nullcontext():
            chosen, rejected = (
                model(*models.tokens(2 * index + i, run.rank)).log_softmax(-1)[..., 0].sum(-1) for i in range(2)
            )
            loss = -nn.functional.logsigmoid(chosen - rejected).mean()
            loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()
