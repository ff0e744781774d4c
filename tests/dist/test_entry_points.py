"""Ways into a model other than one forward and one backward of the root."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import models
import pytest
import torch
from test_training import BITWISE, loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method, share_comm_ctx

from graphshard.testing import TrainingRun, Ulps, training_test

DIM = models.DIM
# Two forwards of one model before its backward.
SUMMED = Ulps(8, "eager reduces the sum of both gradients once, each program may reduce its own", atol=1e-6)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def mlps(run: TrainingRun, **options: Any) -> nn.Sequential:
    """Three units and a root with parameters of its own."""
    model = nn.Sequential(*(Mlp() for _ in range(3)), nn.LayerNorm(DIM))
    return run.shard(model, units=[Mlp], **options)


def counted(run: TrainingRun, index: int) -> Any:
    """Counts launches of every step but the first, which builds programs."""
    return run.counted(f"step {index}") if index else nullcontext()


def update(run: TrainingRun, loss: Tensor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    run.observe(loss, model)
    optimizer.step()
    optimizer.zero_grad()


# --- submodules


@pytest.mark.row("S12")
@pytest.mark.parametrize("reshard", [None, True])
@training_test()
def test_submodule_trains_by_itself_after_the_root_ran(run: TrainingRun, reshard: bool | None) -> None:
    model = mlps(run, reshard_after_forward=reshard)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for index in range(3):
        loss = model(*models.features(3 * index, run.rank)).square().mean()
        loss.backward()
        update(run, loss, model, optimizer)
        with counted(run, index):
            loss = model[0](*models.features(3 * index + 1, run.rank)).square().mean()
            loss.backward()
        run.note("without gradients", [name for name, p in model.named_parameters() if p.grad is None])
        update(run, loss, model, optimizer)
    with torch.no_grad():
        run.note("last loss", model(*models.features(100, run.rank)).square().mean())


@pytest.mark.row("S12")
@training_test()
def test_two_submodules_share_a_loss(run: TrainingRun) -> None:
    model = mlps(run)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    (model(*models.features(99, run.rank)).sum()).backward()
    optimizer.zero_grad()
    for index in range(3):
        (x,) = models.features(index, run.rank)
        with counted(run, index):
            loss = (model[2](x) * model[0](x)).mean()
            loss.backward()
        update(run, loss, model, optimizer)


# --- methods


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, 3)  # the method does not use it

    def forward_features(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        x = self.patch(x) * scale
        for block in self.blocks:
            x = block(x)
        return {"features": self.norm(x)}

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.forward_features(x)["features"])
        return logits


class Classifier(nn.Module):
    """Uses its child by a method that is not forward."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = Vision()
        self.projector = nn.Linear(DIM, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.projector(self.vision.forward_features(x, scale=0.5)["features"])
        return logits


def vision_unit(model: nn.Module, mesh: DeviceMesh) -> None:
    assert isinstance(model, Classifier)
    for block in model.vision.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model.vision, mesh=mesh)
    fully_shard(model, mesh=mesh)


def vision_unit_and_method(model: nn.Module, mesh: DeviceMesh) -> None:
    vision_unit(model, mesh)
    register_fsdp_forward_method(model.vision, "forward_features")  # type: ignore[arg-type]


@pytest.mark.row("S36")
@pytest.mark.parametrize("registered", ["before compile", "after compile"])
@training_test()
def test_registered_method_of_a_child_is_a_forward(run: TrainingRun, registered: str) -> None:
    before = registered == "before compile"
    model = run.shard(Classifier(), annotate=vision_unit_and_method if before else vision_unit)
    if not before:
        register_fsdp_forward_method(model.vision, "forward_features")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for index in range(3):
        with counted(run, index):
            loss = model(*models.features(index, run.rank)).square().mean()
            loss.backward()
        update(run, loss, model, optimizer)  # vision.head has no gradient


@pytest.mark.row("S36")
@pytest.mark.parametrize("forward_too", [False, True])
@training_test()
def test_registered_method_of_the_root_is_called_alone(run: TrainingRun, forward_too: bool) -> None:
    model = run.shard(Vision(), units=[Mlp])
    register_fsdp_forward_method(model, "forward_features")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for index in range(3):
        (x,) = models.features(index, run.rank)
        with counted(run, index):
            if forward_too and index % 2:
                loss = model(x).square().mean()
            else:
                loss = model.forward_features(x, scale=2.0)["features"].pow(3).mean()
            loss.backward()
        update(run, loss, model, optimizer)


class WithMethods(nn.Module):
    """Ordinary methods: one that calls the model, and one of a child that is no unit."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = Vision()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.vision.head(self.vision.forward_features(x)["features"]) * self.scale

    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(x), target)


@pytest.mark.row("S36")
@training_test()
def test_plain_methods_need_no_registration(run: TrainingRun) -> None:
    model = run.shard(WithMethods(), units=[Mlp])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for index in range(3):
        (x,) = models.features(index, run.rank)
        with counted(run, index):
            loss = model.loss(x, torch.arange(4) % 3)
            loss.backward()
        update(run, loss, model, optimizer)


# --- forwards and backwards


@pytest.mark.row("S13", "S22")
@pytest.mark.parametrize("reshard", [True, False, None])
@training_test(tolerance=SUMMED)
def test_two_forwards_before_one_backward_launch_as_eager_does(run: TrainingRun, reshard: bool | None) -> None:
    model = mlps(run, reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(3):
        with counted(run, index):
            first, second = (model(*models.features(2 * index + i, run.rank)).pow(3).mean() for i in range(2))
            loss = first * 2 + second
            loss.backward()
        update(run, loss, model, optimizer)


@training_test(tolerance=SUMMED)
def test_second_forward_reads_the_output_of_the_first(run: TrainingRun) -> None:
    model = mlps(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(3):
        with counted(run, index):
            loss = model(torch.tanh(model(*models.features(index, run.rank)))).pow(3).mean()
            loss.backward()
        update(run, loss, model, optimizer)


@training_test()
def test_gradients_of_inputs_alone(run: TrainingRun) -> None:
    model = mlps(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(3):
        x = models.features(2 * index, run.rank)[0].requires_grad_()
        loss = model(x).pow(3).mean()
        (gradient,) = torch.autograd.grad(loss, x)
        run.observe(loss, model, outputs=gradient)
        assert all(parameter.grad is None for parameter in model.parameters())
        loss = model(*models.features(2 * index + 1, run.rank)).pow(3).mean()  # trains as if nothing had been
        loss.backward()
        update(run, loss, model, optimizer)


@training_test()
def test_gradients_of_inputs_alone_reduce_nothing(run: TrainingRun) -> None:
    model = mlps(run)
    for index in range(2):
        x = models.features(index, run.rank)[0].requires_grad_()
        with counted(run, index):
            loss = model(x).pow(3).mean()
            run.note(f"gradient {index}", torch.autograd.grad(loss, x))
        run.observe(loss, model)


@training_test()
def test_gradients_flow_through_the_model_to_inputs(run: TrainingRun) -> None:
    before, after = nn.Linear(DIM, DIM), nn.Linear(DIM, 3)  # whole on each rank, and not reduced
    model = mlps(run)
    optimizer = torch.optim.SGD([*before.parameters(), *model.parameters(), *after.parameters()], lr=0.1, foreach=False)
    for index in range(3):
        x = models.features(index, run.rank)[0].requires_grad_()
        loss = after(model(before(x))).square().mean()
        loss.backward()
        run.note(f"step {index}", {"x": x.grad, "before": before.weight.grad, "after": after.weight.grad})
        update(run, loss, model, optimizer)


# --- hooks


@training_test()
def test_hooks_see_gradients_of_modules_and_tensors(run: TrainingRun) -> None:
    model = mlps(run)
    shapes: list[tuple[str, tuple[int, ...]]] = []

    def double(module: nn.Module, inputs: Any, outputs: Any) -> tuple[Tensor]:
        shapes.append(("module", tuple(outputs[0].shape)))
        return (inputs[0] * 2,)

    model[1].register_full_backward_hook(double)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(3):
        output = model(*models.features(index, run.rank))
        output.register_hook(lambda gradient: gradient * 3)
        loss = output.pow(3).mean()
        loss.backward()
        update(run, loss, model, optimizer)
    run.note("shapes", shapes)


@training_test()
def test_post_accumulate_hook_fires_once_per_parameter(run: TrainingRun) -> None:
    model = mlps(run)
    fired: list[str] = []
    for name, parameter in model.named_parameters():

        def halve(parameter: Tensor, name: str = name) -> None:
            fired.append(name)
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

        parameter.register_post_accumulate_grad_hook(halve)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(3):
        for microbatch in range(2):
            model.set_requires_gradient_sync(microbatch == 1)  # type: ignore[operator]
            loss = model(*models.features(2 * index + microbatch, run.rank)).pow(3).mean()
            loss.backward()
            run.note(f"step {index}.{microbatch}: fired", sorted(fired))
            fired.clear()
        update(run, loss, model, optimizer)


@training_test()
def test_optimizer_steps_inside_backward(run: TrainingRun) -> None:
    model = run.shard(models.Decoder(layers=2))
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def step(parameter: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    for index in range(3):
        loss = loss_of(model, run, index)
        loss.backward()
        run.observe(loss, model)


# --- failures


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(3))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if self.fails and i == 1:
                raise ValueError("in the middle of forward")
        return x


needs_reset = pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="FSDP2 of torch 2.13 and later")


@needs_reset
@pytest.mark.row("S21")
@pytest.mark.parametrize("at", [0, 1])
@training_test(tolerance=BITWISE)
def test_training_goes_on_after_an_exception(run: TrainingRun, at: int) -> None:
    model = run.shard(Fails(), units=[Mlp])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(3):
        if index == at:
            model.fails = True
            with pytest.raises(ValueError, match="in the middle"):
                model(*models.features(50, run.rank))
            model.fails = False
            model.reset_iter_state()
            run.note_registration("reset", model)
        with run.counted(f"step {index}") if index == 2 else nullcontext():
            loss = model(*models.features(index, run.rank)).pow(3).mean()
            loss.backward()
        update(run, loss, model, optimizer)


# --- several roots


def three_roots(model: nn.Module, mesh: DeviceMesh) -> None:
    assert isinstance(model, nn.Sequential)
    share_comm_ctx([fully_shard(part, mesh=mesh) for part in model])  # type: ignore[misc]


@pytest.mark.row("S37")
@pytest.mark.parametrize("compiled", ["as one", "one by one"])
@training_test()
def test_roots_that_share_streams(run: TrainingRun, compiled: str) -> None:
    model = nn.Sequential(*(Mlp() for _ in range(3)))
    if compiled == "as one":
        run.shard(model, annotate=three_roots)
    else:
        for part in model:
            run.shard(part, units=[])
        share_comm_ctx(list(model))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(3):
        with counted(run, index):
            loss = model(*models.features(index, run.rank)).pow(3).mean()
            loss.backward()
        update(run, loss, model, optimizer)
