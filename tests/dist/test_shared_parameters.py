"""Parameters and modules that several places of a model share."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import models
import pytest
import torch
from test_training import BITWISE
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard.testing import TrainingRun, WorkerPool, training_test


def next_tokens(run: TrainingRun, model: nn.Module, index: int) -> Tensor:
    """A loss that gives every row of the vocabulary a gradient."""
    (x,) = models.tokens(index, run.rank)
    logits = model(x[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())


def train(run: TrainingRun, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for index in range(steps):
        with run.counted(f"step {index}") if index else nullcontext():
            loss = next_tokens(run, model, index)
            loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.row("S26")
@pytest.mark.parametrize("reshard", [True, False])
@training_test(tolerance=BITWISE)
def test_tied_weights_around_checkpointed_blocks(run: TrainingRun, reshard: bool) -> None:
    model = run.shard(models.Checkpointed(layers=2, tied=True), reshard_after_forward=reshard)
    train(run, model, torch.optim.Adam(model.parameters(), lr=1e-2))
    names = [name for name, _ in model.named_parameters()]
    assert "embed.weight" in names
    assert "head.weight" not in names
    run.note("tied", model.head.weight is model.embed.weight)


@pytest.mark.row("S26")
@training_test(tolerance=BITWISE)
def test_tied_weights_are_tied_again_where_a_state_dict_is_assigned(run: TrainingRun) -> None:
    model = run.shard(models.Decoder(layers=1, tied=True))
    train(run, model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)
    train(run, model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.note("tied", model.head.weight is model.embed.weight)


def tied_group(model: nn.Module, mesh: DeviceMesh) -> None:
    assert isinstance(model, models.Decoder)
    fully_shard([model.embed, model.head], mesh=mesh)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


@pytest.mark.row("S27")
@training_test(world_size=4, tolerance=BITWISE)
def test_every_row_of_an_uneven_tied_group_trains(run: TrainingRun) -> None:
    """31 rows on 4 ranks: the last rank holds one row of padding."""
    model = run.shard(models.Decoder(layers=2, tied=True), annotate=tied_group)
    group = model.embed
    assert isinstance(group, FSDPModule)
    group.unshard()
    run.note("both names", [model.embed.weight is model.head.weight, type(model.embed.weight).__name__])
    before = model.embed.weight.detach().clone()
    run.note("gathered", before)
    group.reshard()
    run.note_registration("resharded", model)
    train(run, model, torch.optim.AdamW(model.parameters(), lr=1e-2), steps=4)
    group.unshard()
    after = model.head.weight.detach().clone()
    group.reshard()
    run.note("gathered again", after)
    assert after.shape == before.shape == (models.VOCAB, models.DIM)
    assert (after != before).any(dim=1).all()


class SharedLayers(nn.Module):
    """One block is called at two depths, and two norms of a unit share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCAB, models.DIM)
        self.block, self.other = models.DecoderBlock(), models.DecoderBlock()
        self.other.norm2.weight = self.other.norm1.weight
        self.again = self.block
        self.head = nn.Linear(models.DIM, models.VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        h = self.again(self.other(self.block(self.embed(x))))
        logits: Tensor = self.head(h)
        return logits


@pytest.mark.row("S26", "S13")
@pytest.mark.parametrize("reshard", [True, False])
@training_test(tolerance=BITWISE)
def test_block_under_two_names_is_one_unit(run: TrainingRun, reshard: bool) -> None:
    model = run.shard(SharedLayers(), units=["block", "other"], reshard_after_forward=reshard)
    train(run, model, torch.optim.Adam(model.parameters(), lr=1e-2))


class SharedDown(SharedLayers):
    """Two blocks have a module in common."""

    def __init__(self) -> None:
        super().__init__()
        self.again = models.DecoderBlock()
        self.again.down = self.block.down


@pytest.mark.parametrize("units", [["other"], ["block", "block.down", "other", "again"]], ids=["root", "own"])
@training_test(tolerance=BITWISE)
def test_module_that_blocks_share_is_the_roots_or_a_unit_of_its_own(run: TrainingRun, units: list[str]) -> None:
    model = run.shard(SharedDown(), units=units)
    train(run, model, torch.optim.Adam(model.parameters(), lr=1e-2))


def two_groups(model: nn.Module, mesh: DeviceMesh) -> None:
    assert isinstance(model, models.Decoder)
    fully_shard(model.embed, mesh=mesh)
    fully_shard(model.head, mesh=mesh)
    fully_shard(model, mesh=mesh)


def refused_in_two_groups(compiled: bool) -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = models.Decoder(layers=1, tied=True)
    two_groups(model, mesh)
    with pytest.raises(ValueError, match="already managed by another"):
        if compiled:
            graphshard.compile(model, backend="aot_eager")
        model(*models.tokens(0, torch.distributed.get_rank()))


@pytest.mark.skipif(torch.__version__ < "2.13", reason="FSDP2 refuses it since torch 2.13")
@pytest.mark.row("S28")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_tied_weights_in_two_units_are_refused(four_ranks: WorkerPool, compiled: bool) -> None:
    four_ranks.run(refused_in_two_groups, compiled)


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16] if models.ROUNDS_GRADIENTS else [None])
@training_test(tolerance=BITWISE)
def test_what_stays_gathered_is_used_behind_the_forward(
    run: TrainingRun, param_dtype: torch.dtype | None, sync: bool
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)

    def annotate(model: nn.Sequential, mesh: DeviceMesh) -> None:
        for layer in model[:-1]:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)

    model: Any = run.shard(nn.Sequential(*models.mlps(2), nn.Linear(models.DIM, 6, bias=False)), annotate=annotate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(4):
        model.set_requires_gradient_sync(sync or index % 2 == 1)
        hidden = model(*models.features(index, run.rank))
        loss = nn.functional.linear(hidden, model[-1].weight.t()).float().square().mean()
        loss.backward()
        run.observe(loss, model)
        if sync or index % 2:
            optimizer.step()
            optimizer.zero_grad()


@training_test(tolerance=BITWISE)
def test_checkpoint_around_the_model_reads_shards(run: TrainingRun) -> None:
    model: Any = run.shard(models.mlps(2))
    one = torch.ones((), requires_grad=True)
    loss = model(*models.features(0, run.rank)).square().mean()
    penalty = checkpoint(lambda x: (model[1].up.weight.to_local() ** 2).sum() * x, one, use_reentrant=False)
    (loss + penalty).backward()
    run.observe(loss, model)
    run.note("penalty", one.grad)
