"""What a program does to a sharded model between its steps: other dtypes and optimizers, loss scaling, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from graphshard.testing import Bitwise, TrainingRun, WorkerPool, training_test
from graphshard.testing.launches import count_launches
from graphshard.testing.reference import shard_compiled, shard_eager


class Net(nn.Module):
    """Units of uneven sizes; the sums of their weights show in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(models.DIM, models.DIM) for _ in range(2))
        self.head = nn.Linear(models.DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out: Tensor = self.head(x)
        return out


def fully_sharded(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def replicated(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.layers:
        replicate(layer, mesh=mesh)
    replicate(model, mesh=mesh)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


def loss_of(model: nn.Module, rank: int, index: int, dtype: torch.dtype = torch.float32) -> Tensor:
    loss: Tensor = model(models.features(index, rank)[0].to(dtype)).square().mean()
    return loss


def step(run: TrainingRun, model: nn.Module, optimizer: torch.optim.Optimizer, index: int, **options: Any) -> Tensor:
    loss = loss_of(model, run.rank, index, **options)
    loss.backward()
    run.observe(loss, model)
    optimizer.step()
    optimizer.zero_grad(set_to_none=index % 2 == 0)
    return loss.detach()


def dtypes(model: nn.Module) -> list[tuple[str, ...]]:
    """By parameter: its dtype, its shard's, its full value's and its gradient's."""
    seen = []
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        tensors = [parameter, parameter.to_local(), parameter.full_tensor()]
        tensors += [] if parameter.grad is None else [parameter.grad, parameter.grad.to_local()]
        seen.append(tuple(str(tensor.dtype) for tensor in tensors))
    return seen


@pytest.mark.row("S6")
@training_test()
def test_model_is_float64_after_sharding(run: TrainingRun) -> None:
    to_float64(run, fully_sharded)


@pytest.mark.row("R4")
@training_test()
def test_replicated_model_is_float64_after_sharding(run: TrainingRun) -> None:
    to_float64(run, replicated)


def to_float64(run: TrainingRun, annotate: Any) -> None:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model = run.shard(Net(), annotate=annotate)
        model.to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    run.note("dtypes at first", dtypes(model))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True)
    for index in range(4):
        step(run, model, optimizer, index, dtype=torch.float64)
        run.note("dtypes of parameters, and of gradients that were zeroed", dtypes(model))


# Only before the first forward: later on, eager FSDP2 keeps gathering into buffers of the old dtype, and raises.
@pytest.mark.row("state")
@training_test()
def test_model_is_bfloat16_after_sharding(run: TrainingRun) -> None:
    model = run.shard(Net(), annotate=fully_sharded)
    model.to(torch.bfloat16)
    optimizer = adamw(model)
    for index in range(3):
        step(run, model, optimizer, index, dtype=torch.bfloat16)
        run.note("dtypes", dtypes(model))


@pytest.mark.row("state")
@pytest.mark.parametrize("annotate", [fully_sharded, replicated])
@training_test()
def test_module_is_moved_in_mid_training(run: TrainingRun, annotate: Any) -> None:
    model = run.shard(Net(), annotate=annotate)
    optimizer = adamw(model)
    for index in range(3):
        step(run, model, optimizer, index)
        with torch.no_grad():
            loss_of(model, run.rank, 10)
        model.to("cpu", torch.float32)  # changes nothing, but reshards what that forward left unsharded
        run.note_registration(f"after the move {index}", model)


@pytest.mark.row("state")
@training_test()
def test_optimizer_is_replaced_in_mid_training(run: TrainingRun) -> None:
    model = run.shard(Net())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), adamw(model)]
    for index, chosen in enumerate([0, 0, 1, 1]):
        step(run, model, optimizers[chosen], index)
    # One optimizer's state moves to a new object, as when a program is restarted.
    successor = adamw(model)
    successor.load_state_dict(optimizers[1].state_dict())
    step(run, model, successor, 4)


@pytest.mark.row("state")
@training_test(tolerance=Bitwise(equal_zeros="a sum with a zero term loses the sign of zero"))
def test_microbatches_accumulate_into_zeroed_gradients(run: TrainingRun) -> None:
    model: Any = run.shard(Net())
    optimizer = adamw(model)
    for index in range(4):
        model.set_requires_gradient_sync(False)
        loss_of(model, run.rank, 2 * index).backward()
        model.set_requires_gradient_sync(True)
        step(run, model, optimizer, index)


@pytest.mark.row("state")
@training_test()
def test_gradient_scaler_skips_a_step_that_overflows(run: TrainingRun) -> None:
    model = run.shard(Net())
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for index in range(5):
        loss = loss_of(model, run.rank, index)
        # Rank 1 alone overflows: through the reduction every rank must see it, and leave the step out.
        scaled = scaler.scale(loss * (torch.inf if index == 2 and run.rank == 1 else 1.0))
        scaled.backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if index != 2:
            run.observe(loss, model, outputs=norm)
        before = [parameter.to_local().clone() for parameter in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        same = [torch.equal(p.to_local(), b) for p, b in zip(model.parameters(), before, strict=True)]
        run.note("scale", scaler.get_scale())
        run.note("nothing moved", all(same))
        assert all(same) == (index == 2)


@pytest.mark.row("state")
@pytest.mark.parametrize("annotate", [fully_sharded, replicated])
@training_test()
def test_training_resumes_from_a_checkpoint(run: TrainingRun, annotate: Any, tmp_path: Path) -> None:
    model = run.shard(Net(), annotate=annotate)
    optimizer = adamw(model)
    for index in range(2):
        step(run, model, optimizer, index)
    folder = tmp_path / ("reference" if run.is_reference else "compiled")
    save(model, optimizer, folder)
    uninterrupted = [step(run, model, optimizer, index) for index in range(2, 4)]

    torch.manual_seed(1)
    resumed = run.shard(Net(), annotate=annotate)
    optimizer = adamw(resumed)
    load(resumed, optimizer, folder)
    for index, wanted in enumerate(uninterrupted, 2):
        assert torch.equal(step(run, resumed, optimizer, index), wanted)


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    parameters, state = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": state}, checkpoint_id=folder)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    parameters, state = get_state_dict(model, optimizer)
    dcp.load({"model": parameters, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=state)


@pytest.mark.row("state")
def test_training_resumes_on_fewer_ranks(two_ranks: WorkerPool, four_ranks: WorkerPool, tmp_path: Path) -> None:
    ends = []
    for backend in (None, "aot_eager"):
        folder = tmp_path / (backend or "reference")
        saved = four_ranks.run(train_and_save, backend, folder)[0]
        loaded, end = two_ranks.run(load_and_train, backend, folder)[0]
        assert saved.keys() == loaded.keys()
        assert all(torch.equal(saved[name], loaded[name]) for name in saved)
        assert not any(torch.equal(end[name], loaded[name]) for name in end)
        ends.append((saved, end))
    for eager, compiled in zip(*ends, strict=True):
        assert eager.keys() == compiled.keys()
        assert all(torch.equal(eager[name], compiled[name]) for name in eager)


def sharded(backend: str | None) -> nn.Module:
    """A model on all ranks; backend None: under eager FSDP2."""
    model, mesh = Net(), init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("dp",))
    if backend is None:
        shard_eager(model, mesh, {}, None)
    else:
        shard_compiled(model, mesh, backend, {}, None)
    return model


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def train_and_save(backend: str | None, folder: Path) -> dict[str, Tensor]:
    model = sharded(backend)
    optimizer = adamw(model)
    for index in range(2):
        loss_of(model, torch.distributed.get_rank(), index).backward()
        optimizer.step()
        optimizer.zero_grad()
    save(model, optimizer, folder)
    return full_parameters(model)


def load_and_train(backend: str | None, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(1)
    model = sharded(backend)
    optimizer = adamw(model)
    load(model, optimizer, folder)
    loaded = {name: value.clone() for name, value in full_parameters(model).items()}
    for index in range(2):
        loss_of(model, torch.distributed.get_rank(), index).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loaded, full_parameters(model)


FORMS = {
    "sharded": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True),
    "full, broadcast from rank 0": StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
}


@pytest.mark.row("state")
@pytest.mark.parametrize("form", FORMS)
@training_test()
def test_state_dict_of_a_trained_model_is_loaded(run: TrainingRun, form: str) -> None:
    options = FORMS[form]
    model = run.shard(models.Decoder(layers=1, tied=True))
    optimizer = adamw(model)
    for index in range(2):
        decode(run, model, optimizer, index)
    state = get_model_state_dict(model, options=options)
    run.note("state dict", state)
    if options.broadcast_from_rank0 and run.rank != 0:
        state = {}
    # Into a model that has already run: what it gathered before must not be used again.
    torch.manual_seed(1)
    other = run.shard(models.Decoder(layers=1, tied=True))
    decode(run, other, adamw(other), 5)
    set_model_state_dict(other, state, options=options)
    optimizer = adamw(other)
    for index in range(2, 4):
        decode(run, other, optimizer, index)


def decode(run: TrainingRun, model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
    loss: Tensor = model(*models.tokens(index, run.rank)).square().mean()
    loss.backward()
    run.observe(loss, model)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.row("state")
@pytest.mark.parametrize("annotate", [fully_sharded, replicated])
@training_test()
def test_looking_at_parameters_launches_nothing(run: TrainingRun, annotate: Any) -> None:
    model: Any = run.shard(Net(), annotate=annotate)
    optimizer = adamw(model)
    for index in range(2):
        look_at_parameters(model)
        loss = loss_of(model, run.rank, index)
        look_at_parameters(model)
        loss.backward()
        look_at_parameters(model)
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


def look_at_parameters(model: Any) -> None:
    with count_launches() as launches:
        for name, parameter in model.named_parameters():
            assert name in model.state_dict()
            assert parameter.requires_grad
            assert parameter.grad is None or parameter.grad.shape == parameter.shape
        # Each of them in the way a program reads it: by attribute, by index, by name.
        first = model.layers[0].weight
        assert first.shape == (models.DIM, models.DIM)
        assert model.get_parameter("layers.0.weight") is first
        assert hasattr(model.head, "weight")
        assert "layers.1.bias" in dict(model.named_parameters())
        assert str(model)
    assert not any(launches.values()), launches
