"""Experts as torchtitan lays them out: cut over "ep" as DTensors, sharded over "efsdp", all else over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import torch._dynamo.config as dynamo_config
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor

import graphshard
from graphshard.testing import Bitwise, TrainingRun, training_test

pytestmark = pytest.mark.row("X5")

BITWISE = Bitwise(equal_zeros="a sum with a zero term loses the sign of zero")
EXPERTS = 2


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, models.DIM, 2 * models.DIM) / models.DIM)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * models.DIM, models.DIM) / models.DIM)

    def forward(self, x: Tensor, splits: Any) -> Tensor:
        """Of the one expert that this rank has."""
        up, down = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in (self.up, self.down))
        return torch.relu(x @ up[0]) @ down[0]


class Routed(nn.Module):
    def __init__(self, measured: bool) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(models.DIM), nn.Linear(models.DIM, EXPERTS), Experts()
        self.measured = measured

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(self.norm(x)).softmax(-1)
        # Chosen, or by turns: then each expert gets as many from each rank.
        expert = scores.argmax(-1) if self.measured else torch.arange(len(x)) % EXPERTS
        order = expert.argsort(stable=True)
        counts = (expert[:, None] == torch.arange(EXPERTS)).sum(0) if self.measured else None
        out = self.experts(x[order], counts)
        weight = scores.gather(1, expert[:, None])
        return x + weight * torch.zeros_like(x).index_copy(0, order, out)


def cut(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for own, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, own, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))


def dispatch(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> tuple[Tensor, Any]:
    x, counts = inputs
    group = mesh.get_group()
    if counts is None:
        sent = received = [len(x) // EXPERTS] * EXPERTS
    else:
        with torch.no_grad():
            received = funcol.all_to_all_single(counts, None, None, group).tolist()
            sent = counts.tolist()
    module.splits = (sent, received)  # type: ignore[assignment]
    return funcol.all_to_all_single_autograd(x, received, sent, group), None


def combine(module: nn.Module, output: Tensor, mesh: DeviceMesh) -> Tensor:
    sent, received = module.splits  # type: ignore[misc]
    back: Tensor = funcol.all_to_all_single_autograd(output, sent, received, mesh.get_group())
    return back


def expert_parallel(dim: int) -> Callable[[nn.Module, DeviceMesh], None]:
    """Experts are sharded along `dim` over the ranks that have the same one; all is replicated over what else the mesh
    has.
    """

    def annotate(model: nn.Module, mesh: DeviceMesh) -> None:
        ranks, own = mesh["efsdp", "ep"]._flatten("dp"), mesh["efsdp"]
        if mesh.ndim > 2:
            ranks, own = DeviceMesh._concatenate([mesh["replicas"], ranks]), mesh["replicas", "efsdp"]
        for layer in model.children():
            assert isinstance(layer, Routed)
            distribute_module(layer.experts, mesh["ep"], cut, dispatch, combine)  # type: ignore[arg-type]
            fully_shard(layer.experts, mesh=own, shard_placement_fn=lambda _: Shard(dim))
            layer.experts.set_gradient_divide_factor(float(mesh.size()))  # type: ignore[operator]
            layer.experts.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]  # gloo scales nothing
            fully_shard(layer, mesh=ranks)
        fully_shard(model, mesh=ranks)

    return annotate


def train(run: TrainingRun, dim: int, measured: bool) -> None:
    """Batches grow; as torchtitan sets it, numbers that depend on data do not break graphs."""
    model = run.shard(nn.Sequential(*(Routed(measured) for _ in range(2))), annotate=expert_parallel(dim))
    run.note_registration("sharded", model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for index in range(3):
        x = torch.randn(4 + 2 * index, models.DIM, generator=models.generator(index, run.rank))
        loss = model(x).square().mean()
        loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()
    run.note_registration("trained", model)


@pytest.mark.parametrize("measured", [False, True], ids=["by turns", "chosen"])
@pytest.mark.parametrize("dim", [0, 1])
@training_test(world_size=4, mesh_shape=(2, 2), mesh_axes=("efsdp", "ep"), tolerance=BITWISE)
def test_experts_cut_and_sharded(run: TrainingRun, dim: int, measured: bool) -> None:
    with dynamo_config.patch(capture_scalar_outputs=True):
        train(run, dim, measured)
    # One graph for the first batch, one for all sizes.
    assert run.is_reference or graphshard.report(run.models[0]).regions == 2


@pytest.mark.skipif(not hasattr(DeviceMesh, "_concatenate"), reason="this torch cannot put meshes together")
@training_test(world_size=4, mesh_shape=(2, 1, 2), mesh_axes=("replicas", "efsdp", "ep"), tolerance=BITWISE)
def test_experts_cut_and_replicated(run: TrainingRun) -> None:
    with dynamo_config.patch(capture_scalar_outputs=True):
        train(run, dim=1, measured=True)
