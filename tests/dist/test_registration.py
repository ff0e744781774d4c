"""What `named_parameters` yields around forward and backward, and models without parameters or inputs."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import models
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from graphshard.testing import TrainingRun, training_test

DIM = 3  # no world size here divides it
HIDDEN = 7  # with 5, 4 ranks and shards over 2, FSDP2 registers other rows than its DTensor says


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def inputs(run: TrainingRun, index: int) -> Tensor:
    return torch.randn(4, DIM, generator=models.generator(index, run.rank))


def reshard_all(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@pytest.mark.row("S3", "S4")
@pytest.mark.parametrize(("reshard", "units"), [(None, 3), (2, 1)], ids=str)
@training_test(world_size=4)
def test_registered_parameters_follow_reshard_after_forward(run: TrainingRun, reshard: int | None, units: int) -> None:
    def annotate(model: nn.Module, mesh: DeviceMesh) -> None:
        for block in list(model.children())[: units - 1]:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)

    model = run.shard(nn.Sequential(*(Mlp() for _ in range(3))), annotate=annotate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(2):
        run.note_registration(f"step {index}, before forward", model)
        loss = model(inputs(run, index)).square().mean()
        run.note_registration(f"step {index}, after forward", model)
        loss.backward()
        run.note_registration(f"step {index}, after backward", model)
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.row("S3")
@training_test(world_size=4)
def test_reshard_between_forward_and_backward_restores_sharded_parameters(run: TrainingRun) -> None:
    def annotate(model: nn.Module, mesh: DeviceMesh) -> None:
        for block in model.children():
            fully_shard(block, mesh=mesh, reshard_after_forward=2)
        fully_shard(model, mesh=mesh, reshard_after_forward=2)

    model = run.shard(nn.Sequential(Mlp(), nn.Linear(DIM, DIM), Mlp()), annotate=annotate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(3):
        with run.counted(f"step {index}") if index else nullcontext():
            loss = model(inputs(run, index)).square().mean()
            reshard_all(model)
            run.note_registration(f"step {index}, resharded", model)
            loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.row("S3")
@training_test(train=False)
def test_evaluation_leaves_parameters_as_eager_does(run: TrainingRun) -> None:
    model = run.shard(nn.Sequential(*(Mlp() for _ in range(2))), units=[Mlp])
    for index in range(2):
        with torch.no_grad():
            run.note("output", model(inputs(run, index)))
        run.note_registration(f"step {index}, after forward", model)
        reshard_all(model)
        run.note_registration(f"step {index}, resharded", model)


@pytest.mark.row("S6")
@training_test()
def test_parameters_and_gradients_change_dtype_after_sharding(run: TrainingRun) -> None:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model = run.shard(nn.Sequential(*(Mlp() for _ in range(3))), units=[Mlp])
        model.to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    run.note_registration("converted", model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True)
    for index in range(4):
        loss = model(inputs(run, index).double()).square().mean()
        loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=index % 2 == 0)
    run.note("dtypes", [str(p.dtype) for p in model.parameters()])


@pytest.mark.row("S1")
@training_test()
def test_module_without_parameters_runs_and_communicates_nothing(run: TrainingRun) -> None:
    model = run.shard(models.Product(), annotate=lambda model, mesh: fully_shard(model, mesh=mesh)).to("cpu")
    for index in range(3):
        leaves = [inputs(run, 3 * index + i).requires_grad_() for i in range(3)]
        with run.counted(f"step {index}") if index else nullcontext():
            loss = model(leaves[0], (leaves[1], leaves[2])).sum()
            loss.backward()
        run.observe(loss, model, outputs=[leaf.grad for leaf in leaves])
    assert not any(launches for _, counts in run.counts for launches in counts.values())


@pytest.mark.row("S1")
@training_test()
def test_root_owns_no_parameters(run: TrainingRun) -> None:
    model = run.shard(nn.Sequential(Mlp(), nn.Tanh(), Mlp()), units=[Mlp]).to("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(3):
        with run.counted(f"step {index}") if index else nullcontext():
            loss = model(inputs(run, index)).square().mean()
            loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


class Gram(nn.Module):
    """A forward without arguments that reads its weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, DIM))

    def forward(self) -> Tensor:
        return self.weight @ self.weight.T


class GramOfUnits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.grams = nn.ModuleList(Gram() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self) -> Tensor:
        first, second = (gram() for gram in self.grams)
        return (first @ second) * self.scale


@pytest.mark.row("S2")
@pytest.mark.parametrize("model_class", [Gram, GramOfUnits])
@training_test()
def test_forward_without_inputs_reduces_gradients(run: TrainingRun, model_class: type[nn.Module]) -> None:
    model = run.shard(model_class(), units=[] if model_class is Gram else [Gram])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for index in range(3):
        with run.counted(f"step {index}") if index else nullcontext():
            output = model()
            weight = torch.randn(output.shape, generator=models.generator(index, run.rank))
            loss = (output * weight).sum()  # ranks have gradients of their own
            loss.backward()
        run.observe(loss, model, outputs=output)
        optimizer.step()
        optimizer.zero_grad()


def shard_while_building(model: nn.Module, mesh: DeviceMesh) -> None:
    """Blocks are made, sharded and their plain parameters freed one at a time: the next ones may reuse their ids."""
    assert isinstance(model, nn.Sequential)
    for _ in range(6):
        model.append(fully_shard(Mlp(), mesh=mesh))
        gc.collect()
    fully_shard(model, mesh=mesh)


@pytest.mark.row("S29")
@training_test()
def test_blocks_sharded_one_by_one_are_not_taken_for_shared(run: TrainingRun) -> None:
    model = run.shard(nn.Sequential(), annotate=shard_while_building)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(2):
        loss = model(inputs(run, index)).square().mean()
        loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()
