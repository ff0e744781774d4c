"""Parameters that are DTensors on a mesh of all axes, of which `dp_mesh_dims` names the data-parallel ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import models
import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import graphshard
from graphshard.testing import Bitwise, TrainingRun, WorkerPool, training_test

pytestmark = [
    pytest.mark.row("X3"),
    pytest.mark.skipif(
        not hasattr(torch_fsdp, "DataParallelMeshDims"), reason="dp_mesh_dims is there from torch 2.13 on"
    ),
]
BITWISE = Bitwise(equal_zeros="a sum with a zero term loses the sign of zero")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(models.DIM, 2 * models.DIM), nn.Linear(2 * models.DIM, models.DIM)

    def forward(self, x: DTensor) -> Tensor:
        """Activations between layers, and their gradients, are whole over "tp"."""
        out: DTensor = self.down(torch.relu(self.up(x.redistribute(placements=x.placements))))
        return x + out.redistribute(placements=x.placements)


# Of the tensor-parallel axis.
TP: dict[str, Placement] = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}


def on_mesh(
    shard: tuple[str, ...], replicate: tuple[str, ...] = (), **options: Any
) -> Callable[[nn.Module, DeviceMesh], None]:
    """Every layer and the root are on the whole mesh, and sharded over the `shard` axes."""

    def annotate(model: nn.Module, mesh: DeviceMesh) -> None:
        dims: Any = torch_fsdp.DataParallelMeshDims(shard=shard or None, replicate=replicate or None)
        for layer in model.children():
            for name, parameter in list(layer.named_parameters()):
                owner, own = name.split(".")
                placements = [
                    TP.get(name, Replicate()) if axis == "tp" else Replicate() for axis in mesh.mesh_dim_names
                ]
                whole = nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements))
                setattr(layer.get_submodule(owner), own, whole)
            fully_shard(layer, mesh=mesh, dp_mesh_dims=dims, **options)
        fully_shard(model, mesh=mesh, dp_mesh_dims=dims, **options)

    return annotate


def inputs(run: TrainingRun, index: int, placement: Placement) -> DTensor:
    """Other data on each data-parallel rank: parts of a batch, or passed off as copies of it."""
    axes = run.mesh.mesh_dim_names
    data_rank = run.rank // run.mesh["tp"].size() if "tp" in axes else run.rank
    x = torch.randn(4, models.DIM, generator=models.generator(index, data_rank))
    return DTensor.from_local(x, run.mesh, [Replicate() if axis == "tp" else placement for axis in axes])


def train(run: TrainingRun, placement: Placement, accumulated: bool = False, **arguments: Any) -> None:
    torch.manual_seed(0)
    model: Any = run.shard(nn.Sequential(Mlp(), Mlp()), annotate=on_mesh(**arguments))
    run.note_registration("sharded", model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for index in range(3):
        for microbatch in range(1 + accumulated):
            model.set_requires_gradient_sync(not accumulated or microbatch == 1)
            loss = model(inputs(run, 2 * index + microbatch, placement)).float().square().mean().full_tensor()
            loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()
    run.note_registration("trained", model)


COPIES_AND_PARTS = pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=["copies", "parts"])


@COPIES_AND_PARTS
@training_test(tolerance=BITWISE)
def test_one_axis(run: TrainingRun, placement: Placement) -> None:
    train(run, placement, shard=("dp",))


@training_test(tolerance=BITWISE)
def test_replicas_alone(run: TrainingRun) -> None:
    train(run, Shard(0), shard=(), replicate=("dp",))


@training_test(tolerance=BITWISE)
def test_gradients_accumulate_in_half_precision(run: TrainingRun) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    train(run, Shard(0), accumulated=True, shard=("dp",), mp_policy=policy, reshard_after_forward=False)


@COPIES_AND_PARTS
@training_test(world_size=4, mesh_shape=(2, 2), mesh_axes=("dp", "tp"), tolerance=BITWISE)
def test_sharded_and_tensor_parallel(run: TrainingRun, placement: Placement) -> None:
    train(run, placement, accumulated=True, shard=("dp",))


def other_dim(parameter: nn.Parameter) -> Shard:
    """The one that is not cut over "tp"."""
    assert isinstance(parameter, DTensor)
    return Shard(1 if parameter.placements[-1] == Shard(0) and parameter.ndim > 1 else 0)


@training_test(world_size=4, mesh_shape=(2, 2), mesh_axes=("dp", "tp"), tolerance=BITWISE)
def test_shards_of_another_dim_than_the_tensor_parallel_one(run: TrainingRun) -> None:
    train(run, Shard(0), shard=("dp",), shard_placement_fn=other_dim)


@training_test(world_size=4, mesh_shape=(2, 2), mesh_axes=("dp_replicate", "dp_shard"), tolerance=BITWISE)
def test_shards_and_replicas(run: TrainingRun) -> None:
    train(run, Shard(0), accumulated=True, shard=("dp_shard",), replicate=("dp_replicate",))


@training_test(world_size=4, mesh_shape=(2, 2), mesh_axes=("dp", "cp"), tolerance=BITWISE)
def test_two_axes_of_shards(run: TrainingRun) -> None:
    train(run, Shard(0), shard=("dp", "cp"))


@training_test(world_size=8, mesh_shape=(2, 2, 2), mesh_axes=("dp_replicate", "dp_shard", "tp"), tolerance=BITWISE)
def test_shards_and_replicas_and_tensor_parallel(run: TrainingRun) -> None:
    train(run, Shard(0), shard=("dp_shard",), replicate=("dp_replicate",))


def held_and_eager() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model: Any = nn.Sequential(Mlp(), Mlp())
    on_mesh(("dp",))(model, mesh)
    graphshard.compile(model, backend="aot_eager")
    x = DTensor.from_local(torch.ones(2, models.DIM), mesh, [Shard(0)])
    model.set_requires_gradient_sync(False)
    model(x).sum().full_tensor().backward()
    refused = pytest.raises(RuntimeError, match=r"unreduced gradients of 8 parameters .* use dp_mesh_dims")
    with refused, graphshard.eager(model):
        pass
    model.set_requires_gradient_sync(True)
    model(x).sum().full_tensor().backward()
    with graphshard.eager(model):
        model(x).sum().full_tensor().backward()


def test_gradients_that_eager_fsdp2_could_not_add_to_are_refused(two_ranks: WorkerPool) -> None:
    two_ranks.run(held_and_eager)


@training_test(tolerance=BITWISE)
def test_gradients_that_eager_fsdp2_accumulated_are_reduced(run: TrainingRun) -> None:
    torch.manual_seed(0)
    model: Any = run.shard(nn.Sequential(Mlp(), Mlp()), annotate=on_mesh(("dp",)))
    for index in range(2):
        for microbatch in range(2):
            model.set_requires_gradient_sync(microbatch == 1)
            with nullcontext() if run.is_reference or microbatch else graphshard.eager(model):
                loss = model(inputs(run, 2 * index + microbatch, Shard(0))).square().mean().full_tensor()
                loss.backward()
        run.observe(loss, model)
        model.zero_grad()
