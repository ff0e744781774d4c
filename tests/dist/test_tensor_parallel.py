"""Tensor-parallel parameters, sharded again over data-parallel axes; experts on a mesh of their own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import models
import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common as common  # `ShardPlacementResult` has no public name yet
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard.testing import Bitwise, TrainingRun, Ulps, training_test

# DTensors between modules come from hooks that replace inputs; Dynamo of torch 2.11 cannot guard the replaced tuple.
LOCAL_ONLY = torch.__version__ < "2.12"
dtensor_activations = pytest.mark.skipif(LOCAL_ONLY, reason="Dynamo of torch 2.11 fails on DTensors between modules")

BITWISE = Bitwise(equal_zeros="a sum with a zero term loses the sign of zero")
AXES = ("dp", "tp")


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, dim: int, checkpointed: bool = False, layers: int = 3) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.layers = nn.ModuleList([Mlp(dim, dim if i % 2 else 3 * dim) for i in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


class Residual(PrepareModuleInput):
    """What a block whose layers return DTensors adds them to."""

    def __init__(self) -> None:
        super().__init__(input_layouts=Replicate(), desired_input_layouts=Replicate())


def seeded(build: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return build()


def parallelized(
    local: bool, reshard: bool = True, dp: tuple[str, ...] = ("dp",)
) -> Callable[[nn.Module, DeviceMesh], None]:
    """Columns, then rows over "tp"; then every layer and the root over the `dp` axes.

    Args:
        local: activations between the modules are plain tensors, not DTensors; uneven ones must be DTensors.
        reshard: after forward.
        dp: axes.
    """

    def annotate(model: nn.Module, mesh: DeviceMesh) -> None:
        plan: dict[str, ParallelStyle] = {
            "up": ColwiseParallel(use_local_output=local),
            "down": RowwiseParallel(use_local_output=local),
        }
        assert isinstance(model, Stack)
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], plan)
            if not local:
                parallelize_module(layer, mesh["tp"], Residual())
            fully_shard(layer, mesh=mesh[dp], reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh[dp], reshard_after_forward=reshard)

    return annotate


def loss_of(output: Tensor) -> Tensor:
    """Also of a DTensor."""
    whole = output.full_tensor() if isinstance(output, DTensor) else output
    return whole.float().square().mean()


def train(run: TrainingRun, model: nn.Module, dim: int, data_rank: int, steps: int = 3) -> None:
    """Ranks of one tensor-parallel group see the same data."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.note_registration("sharded", model)
    for index in range(steps):
        x = torch.randn(4, 6, dim, generator=models.generator(index, data_rank))
        with run.counted(f"step {index}") if index else nullcontext():
            loss = loss_of(model(x))
            loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()
    run.note_registration("trained", model)


def check_whole_values(model: nn.Module, plain: nn.Module, axes: tuple[str, ...]) -> None:
    """What was cut along several axes is put together as it was, uneven shards included."""
    for parameter, want in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(parameter, DTensor)
        assert parameter.device_mesh.mesh_dim_names == axes
        assert torch.equal(parameter.full_tensor(), want)


@pytest.mark.row("S32")
@pytest.mark.parametrize(
    ("dim", "local", "reshard", "checkpointed"),
    [
        (16, True, True, False),
        pytest.param(5, False, False, True, marks=dtensor_activations),
        pytest.param(3, False, True, False, marks=dtensor_activations),
    ],
)
@training_test(world_size=4, mesh_shape=(2, 2), mesh_axes=AXES, tolerance=BITWISE)
def test_columns_and_rows_are_sharded_again(
    run: TrainingRun, dim: int, local: bool, reshard: bool, checkpointed: bool
) -> None:
    plain = seeded(lambda: Stack(dim, layers=2))
    model = run.shard(seeded(lambda: Stack(dim, checkpointed, layers=2)), annotate=parallelized(local, reshard))
    check_whole_values(model, plain, AXES)
    train(run, model, dim, run.mesh["dp"].get_local_rank())


@training_test(world_size=4, mesh_shape=(2, 2), mesh_axes=AXES, tolerance=BITWISE)
def test_blocks_with_styles_of_their_own_are_traced_once(run: TrainingRun) -> None:
    model = run.shard(seeded(lambda: Stack(8, layers=8)), annotate=parallelized(local=True))
    train(run, model, 8, run.mesh["dp"].get_local_rank(), steps=1)
    # Two kinds of layers; the first of all is called with what needs no gradient.
    assert run.is_reference or graphshard.report(model).twins == 3


@pytest.mark.row("S34")
@pytest.mark.parametrize(
    ("dim", "local", "checkpointed"), [(16, True, False), pytest.param(5, False, True, marks=dtensor_activations)]
)
@training_test(
    world_size=8, mesh_shape=(2, 2, 2), mesh_axes=("dp_replicate", "dp_shard", "tp"), tolerance=BITWISE, timeout_s=240
)
def test_columns_and_rows_are_sharded_and_replicated(
    run: TrainingRun, dim: int, local: bool, checkpointed: bool
) -> None:
    plain = seeded(lambda: Stack(dim, layers=1))
    annotate = parallelized(local, dp=("dp_replicate", "dp_shard"))
    model = run.shard(seeded(lambda: Stack(dim, checkpointed, layers=1)), annotate=annotate)
    check_whole_values(model, plain, ("dp_replicate", "dp_shard", "tp"))
    data_rank = 2 * run.mesh["dp_replicate"].get_local_rank() + run.mesh["dp_shard"].get_local_rank()
    train(run, model, dim, data_rank, steps=2)


@pytest.mark.row("S32")
@training_test(
    world_size=4,
    mesh_shape=(2, 2),
    mesh_axes=AXES,
    backends=("inductor",),
    tolerance=Ulps(64, "Inductor fuses pointwise chains and sums in vector lanes", atol=2e-6),
)
def test_columns_and_rows_within_inductors_rounding(run: TrainingRun) -> None:
    model = run.shard(Stack(8, layers=1), annotate=parallelized(local=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for index in range(2):
        x = torch.randn(4, 8, generator=models.generator(index, run.mesh["dp"].get_local_rank()))
        loss = loss_of(model(x))
        loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(models.DIM), Mlp(models.DIM, 2 * models.DIM)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp.down(torch.relu(self.mlp.up(self.norm(x))))
        return out


def sequence_parallel(dp: tuple[str, ...]) -> Callable[[nn.Module, DeviceMesh], None]:
    """Between the layers the sequence is cut over "tp"; norms have replicated weights. `dp`: axes of shards."""

    def annotate(model: nn.Module, mesh: DeviceMesh) -> None:
        plan = {
            "norm": SequenceParallel(),
            "mlp.up": ColwiseParallel(input_layouts=Shard(1)),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1))
        for layer in model.children():
            parallelize_module(layer, mesh["tp"], plan)
            parallelize_module(layer, mesh["tp"], whole)
            fully_shard(layer, mesh=mesh[dp])
        fully_shard(model, mesh=mesh[dp])

    return annotate


def train_on_sequences(run: TrainingRun, dp: tuple[str, ...]) -> None:
    model = run.shard(nn.Sequential(*(Normed() for _ in range(2))), annotate=sequence_parallel(dp))
    run.note_registration("sharded", model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    group, position = divmod(run.rank, run.mesh["tp"].size())
    for index in range(2):
        x = torch.randn(4, 6, models.DIM, generator=models.generator(index, group)).chunk(2, 1)[position]
        loss = loss_of(model(x))
        loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


@dtensor_activations
@pytest.mark.row("S32")
@training_test(world_size=4, mesh_shape=(2, 2), mesh_axes=AXES, tolerance=BITWISE)
def test_sequence_is_sharded_between_layers(run: TrainingRun) -> None:
    train_on_sequences(run, ("dp",))


@dtensor_activations
@pytest.mark.row("S34")
@training_test(world_size=4, mesh_shape=(2, 1, 2), mesh_axes=("dp_replicate", "dp_shard", "tp"), tolerance=BITWISE)
def test_sequence_is_sharded_between_layers_of_replicas(run: TrainingRun) -> None:
    train_on_sequences(run, ("dp_replicate", "dp_shard"))


def blocks_in_part(model: nn.Module, mesh: DeviceMesh) -> None:
    """Feed-forward layers, embedding and head are tensor-parallel, attention and norms replicated over "tp"."""
    assert isinstance(model, models.Decoder)
    plan: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for i in range(len(model.layers)):
        plan |= {f"layers.{i}.up": ColwiseParallel(), f"layers.{i}.down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"], mp_policy=half)
    fully_shard([model.norm, model.head], mesh=mesh["dp"], mp_policy=half)
    fully_shard(model, mesh=mesh["dp"], mp_policy=half)


@dtensor_activations
@pytest.mark.skipif(
    not models.ROUNDS_GRADIENTS, reason="torch 2.15 reduces some gradients without rounding them to param_dtype"
)
@pytest.mark.row("S32")
@training_test(world_size=4, mesh_shape=(2, 2), mesh_axes=AXES, tolerance=BITWISE)
def test_units_of_plain_and_tensor_parallel_parameters(run: TrainingRun) -> None:
    model = run.shard(models.Decoder(layers=2), annotate=blocks_in_part)
    run.note_registration("sharded", model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for index in range(2):
        for microbatch in range(2):
            model.set_requires_gradient_sync(microbatch == 1)
            loss = loss_of(model(*models.tokens(2 * index + microbatch, run.mesh["dp"].get_local_rank())))
            loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


class Experts(nn.Module):
    """Two experts, of which each rank of "ep" has one; tokens go to the expert of their parity."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(models.DIM, 2 * models.DIM) / models.DIM)
        self.back = nn.Parameter(torch.randn(2 * models.DIM, models.DIM) / models.DIM)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.weight) @ self.back


class Routed(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.norm, self.experts, self.group = nn.LayerNorm(models.DIM), Experts(), group

    def forward(self, x: Tensor) -> Tensor:
        sent = torch.cat([x[::2], x[1::2]])
        received = exchange(self.norm(sent), self.group)
        back = exchange(self.experts(received), self.group)
        even, odd = back.chunk(2)
        return x + torch.stack([even, odd], 1).flatten(0, 1)


def exchange(x: Tensor, group: Any) -> Tensor:
    half = [x.shape[0] // 2] * 2
    swapped: Tensor = funcol.all_to_all_single_autograd(x, half, half, group)
    return swapped


def experts_apart(model: nn.Module, mesh: DeviceMesh) -> None:
    """Experts are sharded over the ranks that have the same one, all else over all ranks."""
    everyone = init_device_mesh("cpu", (mesh.size(),), mesh_dim_names=("dp",))
    for layer in model.children():
        assert isinstance(layer, Routed)
        fully_shard(layer.experts, mesh=mesh["efsdp"])
        layer.experts.set_gradient_divide_factor(float(mesh.size()))  # an expert's gradient has all ranks' tokens
        layer.experts.set_force_sum_reduction_for_comms(True)
        fully_shard(layer, mesh=everyone)
    fully_shard(model, mesh=everyone)


# Per-parameter meshes of one unit (`ShardPlacementResult`) have no public name to import: a unit per mesh instead.
@pytest.mark.row("S33")
@training_test(world_size=4, mesh_shape=(2, 2), mesh_axes=("efsdp", "ep"), tolerance=BITWISE)
def test_experts_are_sharded_over_a_mesh_of_their_own(run: TrainingRun) -> None:
    group = run.mesh["ep"].get_group()
    model: Any = nn.Sequential(*(Routed(group) for _ in range(2)))
    for layer in model:
        with torch.no_grad():
            layer.experts.weight.mul_(1 + run.mesh["ep"].get_local_rank())
    run.shard(model, annotate=experts_apart)
    run.note_registration("sharded", model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for index in range(3):
        with run.counted(f"step {index}") if index else nullcontext():
            loss = loss_of(model(*models.features(index, run.rank)))
            loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.expert = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.expert(torch.tanh(self.dense(x)))
        return out


@pytest.mark.skipif(not hasattr(common, "ShardPlacementResult"), reason="this FSDP2 has one mesh per unit")
@pytest.mark.row("S33")
@training_test(world_size=4, mesh_shape=(2, 2), mesh_axes=("ep", "efsdp"), expect_collectives="at_most")
def test_one_unit_shards_its_parameters_on_two_meshes(run: TrainingRun) -> None:
    whole = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    few, all_ranks = (common.FSDPMeshInfo(mesh, shard_mesh_dim=0) for mesh in (run.mesh["efsdp"], whole))

    def annotate(model: nn.Module, mesh: DeviceMesh) -> None:
        for block in model.children():
            experts = set(block.expert.parameters())  # type: ignore[operator, union-attr]
            fully_shard(
                block,
                mesh=whole,
                shard_placement_fn=lambda p, experts=experts: common.ShardPlacementResult(
                    Shard(0), few if p in experts else all_ranks
                ),
            )
        fully_shard(model, mesh=whole)

    model = run.shard(nn.Sequential(Expert(), Expert()), annotate=annotate)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for index in range(3):
        loss = model(torch.randn(4, 8, generator=models.generator(index, run.rank))).square().mean()
        loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


@training_test(world_size=4, mesh_shape=(2, 2), mesh_axes=AXES, tolerance=BITWISE)
def test_sequences_of_several_lengths_other_ones_on_other_ranks(run: TrainingRun) -> None:
    model = run.shard(seeded(lambda: Stack(8, layers=2)), annotate=parallelized(local=True))
    data_rank = run.mesh["dp"].get_local_rank()
    for lengths in ((5, 5), (6, 5), (7, 6)):
        loss = loss_of(model(torch.randn(2, lengths[data_rank], 8, generator=models.generator(0, data_rank))))
        loss.backward()
        run.observe(loss, model)
        model.zero_grad()
