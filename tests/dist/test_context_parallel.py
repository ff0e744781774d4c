"""Sequences cut over the ranks by torch's `context_parallel`, parameters sharded over the same ranks.

Attention gathers keys and values itself: on CPU torch's own fails under `context_parallel`, in eager as compiled
(`_scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy registered`).
"""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel

import graphshard
from graphshard.testing import Bitwise, TrainingRun, training_test

pytestmark = pytest.mark.row("X6")

BITWISE = Bitwise(equal_zeros="a sum with a zero term loses the sign of zero")
LENGTH = 8


class Block(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.inputs, self.outputs = nn.Linear(models.DIM, 3 * models.DIM), nn.Linear(models.DIM, models.DIM)
        self.group = group

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        query, key, value = self.inputs(x).chunk(3, -1)
        keys, values = (funcol.all_gather_tensor_autograd(part.contiguous(), 1, self.group) for part in (key, value))
        later = funcol.all_gather_tensor(positions, 0, self.group)[None, :] > positions[:, None]
        scores = (query @ keys.transpose(1, 2)).masked_fill(later, float("-inf"))
        return x + self.outputs(scores.softmax(-1) @ values)


class Model(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(group) for _ in range(2))
        self.register_buffer("positions", torch.arange(LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.positions)
        return x


def all_ranks(model: nn.Module, mesh: DeviceMesh) -> None:
    assert isinstance(model, Model)
    ranks = mesh if mesh.ndim == 1 else mesh["dp", "cp"]._flatten("dp_cp")
    for block in model.blocks:
        fully_shard(block, mesh=ranks)
    fully_shard(model, mesh=ranks)


def train(run: TrainingRun) -> None:
    mesh = run.mesh["cp"]
    model: Any = run.shard(Model(mesh.get_group()), annotate=all_ranks)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for index in range(3):
        x = torch.randn(2, LENGTH, models.DIM, generator=models.generator(index, run.rank // mesh.size()))
        y = x.cos()
        with context_parallel(mesh, buffers=[x, y, model.positions], buffer_seq_dims=[1, 1, 0]):
            assert x.shape[1] == LENGTH // mesh.size()
            loss = (model(x) - y).square().mean()
            loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()
    assert run.is_reference or graphshard.report(model).regions == 1


@training_test(mesh_axes=("cp",), tolerance=BITWISE)
def test_sequences_cut_over_all_ranks(run: TrainingRun) -> None:
    train(run)


@training_test(world_size=4, mesh_shape=(2, 2), mesh_axes=("dp", "cp"), tolerance=BITWISE)
def test_sequences_cut_over_one_axis(run: TrainingRun) -> None:
    train(run)
