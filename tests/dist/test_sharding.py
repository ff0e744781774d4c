"""How parameters are cut and gathered: uneven shards, other dims, smaller groups, one rank, and hints about when."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import models
import pytest
import torch
from test_models import INDUCTOR
from test_training import BITWISE, loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import graphshard
from graphshard.testing import TrainingRun, WorkerPool, training_test


def train(run: TrainingRun, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Steps on tokens, each observed; launches are counted once programs exist."""
    for index in range(steps):
        with run.counted(f"step {index}") if index else nullcontext():
            loss = loss_of(model, run, index)
            loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


def perceptron(sizes: tuple[int, int, int]) -> nn.Sequential:
    inputs, hidden, outputs = sizes
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def train_perceptron(run: TrainingRun, model: nn.Sequential, make: Callable[..., Any] = torch.optim.Adam) -> None:
    optimizer = make(model.parameters(), lr=1e-2)
    for index in range(3):
        x = torch.randn(4, model[0].in_features, generator=models.generator(index, run.rank))
        with run.counted(f"step {index}") if index else nullcontext():
            loss = model(x).square().mean()
            loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.row("S7")
@pytest.mark.parametrize("sizes", [(8, 16, 4), (7, 15, 3)], ids=["even", "uneven, an empty shard"])
@training_test(world_size=4)
def test_one_unit_with_shards_of_any_size(run: TrainingRun, sizes: tuple[int, int, int]) -> None:
    train_perceptron(run, run.shard(perceptron(sizes), units=[]))


def largest_dim(parameter: nn.Parameter) -> Shard:
    return Shard(max(range(parameter.ndim), key=lambda dim: parameter.shape[dim]))


def last_dim(parameter: nn.Parameter) -> Shard:
    return Shard(parameter.ndim - 1)


@pytest.mark.row("S8")
@pytest.mark.parametrize("sizes", [(16, 8, 4), (4, 16, 8)], ids=["first layer on dim 1", "second layer on dim 1"])
@training_test()
def test_one_unit_sharded_on_the_largest_dim(run: TrainingRun, sizes: tuple[int, int, int]) -> None:
    train_perceptron(run, run.shard(perceptron(sizes), units=[], shard_placement_fn=largest_dim))


@pytest.mark.row("S38")
@pytest.mark.parametrize("sizes", [(8, 16, 4), (7, 15, 3)], ids=str)
@training_test(world_size=1)
def test_one_rank_communicates_nothing(run: TrainingRun, sizes: tuple[int, int, int]) -> None:
    train_perceptron(run, run.shard(perceptron(sizes), units=[]))
    assert run.counts
    assert not any(launches for _, counts in run.counts for launches in counts.values())


@pytest.mark.row("S9", "S26")
@training_test(world_size=4)
def test_units_of_a_tied_decoder_reshard_to_a_smaller_group(run: TrainingRun) -> None:
    model = run.shard(models.Decoder(layers=2, tied=True), reshard_after_forward=2)
    train(run, model, torch.optim.Adam(model.parameters(), lr=1e-2), steps=3)


@pytest.mark.row("S9")
@training_test(world_size=4)
def test_units_reshard_to_groups_of_their_own(run: TrainingRun) -> None:
    def annotate(model: nn.Module, mesh: DeviceMesh) -> None:
        assert isinstance(model, models.Decoder)
        for layer, reshard in zip(model.layers, (True, False, 2), strict=True):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=2)

    model = run.shard(models.Decoder(), annotate=annotate)
    train(run, model, torch.optim.Adam(model.parameters(), lr=1e-2), steps=3)


class Wide(nn.Module):
    """Uneven parameters on a smaller group: dim 0 is 7, and one parameter has a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x * self.scale


def train_wide(run: TrainingRun, steps: int) -> None:
    model = run.shard(Wide(), units=["layers.0", "layers.1"], reshard_after_forward=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(steps):
        loss = model(torch.randn(4, 7, generator=models.generator(index, run.rank))).square().mean()
        loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.row("S9")
@training_test(world_size=4)
def test_uneven_shards_reshard_to_a_smaller_group(run: TrainingRun) -> None:
    train_wide(run, steps=3)


@pytest.mark.row("S9")
@training_test(world_size=4, backends=("inductor",), tolerance=INDUCTOR)
def test_uneven_shards_reshard_to_a_smaller_group_with_inductor(run: TrainingRun) -> None:
    train_wide(run, steps=2)


@pytest.mark.row("S24")
@pytest.mark.parametrize("reshard", [True, False])
@training_test()
def test_one_bucket_holds_parameters_sharded_on_different_dims(run: TrainingRun, reshard: bool) -> None:
    # Uneven shards exist on dim 0 only: the 31 rows of embed and head.
    def placement(parameter: nn.Parameter) -> Shard | None:
        return None if models.VOCAB in parameter.shape else largest_dim(parameter)

    model = run.shard(models.Decoder(layers=2), shard_placement_fn=placement, reshard_after_forward=reshard)
    run.note("gathered at first", [p.full_tensor() for p in model.parameters()])  # type: ignore[attr-defined]
    train(run, model, torch.optim.AdamW(model.parameters(), lr=1e-2), steps=3)
    run.note("gathered at last", [p.full_tensor() for p in model.parameters()])  # type: ignore[attr-defined]


@pytest.mark.row("S24")
@training_test(backends=("inductor",), tolerance=INDUCTOR)
def test_shards_of_the_last_dim_with_inductor(run: TrainingRun) -> None:
    model = run.shard(perceptron((4, 16, 8)), units=[], shard_placement_fn=last_dim)
    # Adam would turn a gradient's last bit near zero into a whole step.
    train_perceptron(run, model, torch.optim.SGD)


def contiguity(model: nn.Module) -> dict[str, list[bool]]:
    """Of each parameter and gradient, as a DTensor and locally."""
    parts: dict[str, list[Any]] = {}
    for name, parameter in model.named_parameters():
        parts[name] = [parameter, parameter.to_local()]  # type: ignore[attr-defined]
        if parameter.grad is not None:
            parts[name] += [parameter.grad, parameter.grad.to_local()]  # type: ignore[attr-defined]
    return {name: [part.is_contiguous() for part in kept] for name, kept in parts.items()}


@pytest.mark.skipif(torch.__version__ < "2.12", reason="Dynamo of torch 2.11 cannot guard a list that a hook fills")
@pytest.mark.row("S25")
@training_test()
def test_parameters_sharded_on_dim_1_are_contiguous(run: TrainingRun) -> None:
    seen: list[tuple[bool, tuple[int, ...]]] = []

    def look(module: nn.Linear, _: object) -> None:
        seen.append((module.weight.is_contiguous() and module.bias.is_contiguous(), tuple(module.weight.shape)))

    model = nn.Sequential(*(nn.Linear(models.DIM, models.DIM) for _ in range(3)))
    for layer in model:
        layer.register_forward_pre_hook(look)  # type: ignore[arg-type]
    run.shard(model, units=[nn.Linear], shard_placement_fn=last_dim)
    run.note("sharded", contiguity(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(2):
        loss = model(*models.features(index, run.rank)).square().mean()
        loss.backward()
        run.observe(loss, model)
        run.note(f"step {index}", contiguity(model))
        optimizer.step()
        optimizer.zero_grad()
    run.note("in pre-hooks", seen)
    assert seen == [(True, (models.DIM, models.DIM))] * 6


@pytest.mark.row("S11")
@training_test()
def test_unshards_on_the_current_stream_change_no_bit(run: TrainingRun) -> None:
    model = run.shard(models.Decoder(layers=2, tied=True), reshard_after_forward=True)
    model._set_unshard_async_op(True)
    train(run, model, torch.optim.Adam(model.parameters(), lr=1e-2), steps=3)


@pytest.mark.row("S15")
@training_test()
def test_event_after_the_optimizer_changes_no_bit(run: TrainingRun) -> None:
    model: Any = run.shard(models.Decoder(layers=2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    stream = torch.get_device_module(run.mesh.device_type).current_stream()

    def record(*_: object) -> None:
        model.set_post_optim_event(stream.record_event())  # None on CPU, where nothing runs ahead

    optimizer.register_step_post_hook(record)
    train(run, model, optimizer, steps=3)


class Twice(nn.Module):
    """Each block is called twice in a forward, with other modules in between."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = (nn.Linear(models.DIM, models.DIM) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inner(x))
        x = torch.tanh(self.outer(self.inner(x)))
        return x + self.outer(x)


@pytest.mark.row("S13")
@pytest.mark.parametrize("reshard", [True, False, None])
@training_test(tolerance=BITWISE)
def test_unit_called_twice_reduces_its_gradients(run: TrainingRun, reshard: bool | None) -> None:
    model = run.shard(Twice(), units=["inner"], reshard_after_forward=reshard)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for index in range(4):
        with run.counted(f"step {index}") if index else nullcontext():
            loss = model(*models.features(index, run.rank)).square().mean()
            loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


def report_of_units() -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    report = graphshard.report(graphshard.compile(models.unlike_blocks(), mesh, backend="aot_eager"))
    assert report.units == [
        "units in the model: 1 Mlp, beside blocks",
        "units in the model: 1 Biased, of the class of equal blocks",
        "units in the model: 2 Biased, equal blocks",
    ]
    assert all(line in str(report) for line in report.units)
    chosen = graphshard.compile(models.unlike_blocks(), mesh, units=["0"], backend="aot_eager")
    assert graphshard.report(chosen).units == []


def test_report_says_which_units_were_found(two_ranks: WorkerPool) -> None:
    two_ranks.run(report_of_units)
