"""Sharded over one axis of the mesh, replicated over the other."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from graphshard.testing import Bitwise, TrainingRun, Ulps, training_test

BITWISE = Bitwise(equal_zeros="a sum with a zero term loses the sign of zero")
AXES = ("dp_replicate", "dp_shard")
MICROBATCHES = 3


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(models.DIM, 2 * models.DIM), nn.Linear(2 * models.DIM, models.DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Mlps(nn.Module):
    """The root owns the norm."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.norm = nn.LayerNorm(models.DIM)
        self.layers = nn.ModuleList(Mlp() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def loss_of(model: nn.Module, run: TrainingRun, index: int) -> Tensor:
    loss: Tensor = model(*models.features(index, run.rank)).float().square().mean()
    return loss


def train(
    run: TrainingRun,
    model: Any,
    *,
    synchronize_each: bool = False,
    scatter_each: bool = False,
    counted: bool = True,
) -> None:
    """Two steps of microbatches; the losses of all, gradients and parameters after the last, and its launches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(2):
        with run.counted(f"step {index}") if index and counted else nullcontext():
            for microbatch in range(MICROBATCHES):
                is_last = microbatch == MICROBATCHES - 1
                if scatter_each:
                    model.set_requires_all_reduce(is_last)
                elif not synchronize_each:
                    model.set_requires_gradient_sync(is_last)
                loss = loss_of(model, run, MICROBATCHES * index + microbatch)
                loss.backward()
                run.note(f"loss {index}, {microbatch}", loss)
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=index % 2 == 1)
    run.note("parameters", dict(model.named_parameters()))


def check_reductions(run: TrainingRun, *, reduce_scatter: int, all_reduce: int) -> None:
    _, seen = run.counts[-1]
    assert (seen["reduce_scatter"], seen["all_reduce"]) == (reduce_scatter, all_reduce)


@pytest.mark.row("S35")
@pytest.mark.parametrize(
    ("reshard", "checkpointed", "synchronize_each"),
    [(True, True, False), (False, False, True)],
)
@training_test(world_size=4, mesh_shape=(2, 2), mesh_axes=AXES, tolerance=BITWISE)
def test_every_unit_is_scattered_then_all_reduced(
    run: TrainingRun, reshard: bool, checkpointed: bool, synchronize_each: bool
) -> None:
    model = run.shard(Mlps(checkpointed), units=[Mlp], reshard_after_forward=reshard)
    train(run, model, synchronize_each=synchronize_each)
    reductions = 4 * (MICROBATCHES if synchronize_each else 1)
    check_reductions(run, reduce_scatter=reductions, all_reduce=reductions)
    run.note_registration("trained", model)


@pytest.mark.row("S35")
@pytest.mark.parametrize(("checkpointed", "synchronize_each"), [(False, False), (True, True)])
@training_test(world_size=4, mesh_shape=(2, 2), mesh_axes=AXES, tolerance=BITWISE)
def test_offloaded_hybrid_units_accumulate(run: TrainingRun, checkpointed: bool, synchronize_each: bool) -> None:
    model = run.shard(Mlps(checkpointed), units=[Mlp], offload_policy=CPUOffloadPolicy(pin_memory=False))
    train(run, model, synchronize_each=synchronize_each)
    reductions = 4 * (MICROBATCHES if synchronize_each else 1)
    check_reductions(run, reduce_scatter=reductions, all_reduce=reductions)
    run.note("devices", [str(p.device) for p in model.parameters()])


@pytest.mark.row("S30", "S35")
@pytest.mark.parametrize(
    "policy",
    [MixedPrecisionPolicy(torch.bfloat16, torch.float32), MixedPrecisionPolicy(reduce_dtype=torch.float64)],
    ids=["bf16, reduce f32", "reduce f64"],
)
@training_test(world_size=4, mesh_shape=(2, 2), mesh_axes=AXES, tolerance=BITWISE)
def test_scattered_gradients_wait_for_the_last_all_reduce(run: TrainingRun, policy: MixedPrecisionPolicy) -> None:
    model = run.shard(Mlps(), units=[Mlp], mp_policy=policy)
    train(run, model, scatter_each=True)
    check_reductions(run, reduce_scatter=4 * MICROBATCHES, all_reduce=4)


@pytest.mark.row("S35")
@training_test(
    world_size=4,
    backends=("inductor",),
    mesh_shape=(2, 2),
    mesh_axes=AXES,
    tolerance=Ulps(64, "Inductor fuses and reorders float operations", atol=2e-6),
)
def test_hybrid_blocks_within_inductors_rounding(run: TrainingRun) -> None:
    model = run.shard(models.mlps(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for index in range(2):
        with run.counted(f"step {index}") if index else nullcontext():
            loss = model(*models.features(index, run.rank)).square().mean()
            loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.row("S30")
@training_test(mesh_shape=(2, 1), mesh_axes=AXES, tolerance=BITWISE)
def test_shards_of_one_rank_are_all_reduced(run: TrainingRun) -> None:
    train(run, run.shard(Mlps(), units=[Mlp]), scatter_each=True)
    check_reductions(run, reduce_scatter=0, all_reduce=4)


@pytest.mark.row("S30")
@training_test(mesh_shape=(1, 2), mesh_axes=AXES, tolerance=BITWISE)
def test_one_replica_is_scattered(run: TrainingRun) -> None:
    # Not counted: eager FSDP2 launches an all-reduce of a single rank.
    train(run, run.shard(Mlps(), units=[Mlp]), scatter_each=True, counted=False)
