"""What users' own code does in and around forward: hooks, writes into parameters, gathering by hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from test_training import BITWISE, Shift, loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import graphshard
from graphshard.testing import TrainingRun, training_test


def halve(module: nn.Module, inputs: Any, outputs: Any) -> tuple[Tensor]:
    return (inputs[0] * 0.5,)


HOOKS: dict[str, Callable[[Any], object]] = {
    "full backward": lambda layer: layer.register_full_backward_hook(halve),
    "full backward pre": lambda layer: layer.register_full_backward_pre_hook(lambda _, outputs: (outputs[0] * 3,)),
    "forward": lambda layer: layer.register_forward_hook(lambda _, inputs, output: output * 2),
    "forward pre": lambda layer: layer.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,)),
}


@pytest.mark.parametrize("regions", ["model", "unit"])
@training_test(tolerance=BITWISE)
def test_hooks_on_some_of_equal_blocks(run: TrainingRun, regions: str) -> None:
    model = run.shard(models.mlps(len(HOOKS) + 1), **({} if run.is_reference else {"regions": regions}))
    handles: list[Any] = []
    for index in range(3):
        if index == 1:
            handles = [add(layer) for add, layer in zip(HOOKS.values(), model[2:], strict=True)]
        if index == 2:
            for handle in handles:
                handle.remove()
        loss = model(*models.features(index, run.rank)).square().mean()
        loss.backward()
        run.observe(loss, model)
        model.zero_grad()


class Helped(nn.Module):
    """Calls its layers in a function of its own, which is a frame behind a graph break."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def through(self, layer: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = layer(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.children():
            x = self.through(layer, x)
        return x


@pytest.mark.parametrize("at_once", [True, False])
@training_test(tolerance=BITWISE)
def test_backward_hook_on_one_block_that_a_function_calls(run: TrainingRun, at_once: bool) -> None:
    build = Helped(models.mlps(3))  # without the one that has a hook too few for twins, which look at hooks, too
    model = run.shard(build, units=[f"layers.{number}" for number in range(3)])
    for index in range(3):
        if index == (0 if at_once else 1):
            model.layers[2].register_full_backward_hook(halve)
        loss = model(*models.features(index, run.rank)).square().mean()
        loss.backward()
        run.observe(loss, model)
        model.zero_grad()


class Acting(nn.Sequential):
    """Ends in what is replaced."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(models.DIM, models.DIM), nn.ReLU())


@training_test(tolerance=BITWISE)
def test_hook_on_a_child_that_replaced_another(run: TrainingRun) -> None:
    model = run.shard(nn.Sequential(*(Acting() for _ in range(3))), units=["0", "1", "2"])
    for index in range(3):
        if index == 1:
            model[1][1] = nn.Tanh()
        if index == 2:
            model[1][1].register_forward_hook(lambda _, inputs, output: output * 2)
        loss = model(*models.features(index, run.rank)).square().mean()
        loss.backward()
        run.observe(loss, model)
        model.zero_grad()


def twice_of_linear(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
    return output * 2 if isinstance(module, nn.Linear) else None


def halve_of_linear(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(grad * 0.5 for grad in inputs) if isinstance(module, nn.Linear) else None


class HooksItself(nn.Module):
    """Registers hooks on its layers in the middle of a forward, in its graph or outside, and calls them as they are."""

    def __init__(self, outside: bool) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(models.DIM, models.DIM) for _ in range(2))
        self.outside = outside

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.outside:
            torch._dynamo.graph_break()
        handle = self.second.register_forward_hook(lambda _, inputs, output: output * 3)
        out: Tensor = self.second(x)
        handle.remove()
        return out + self.second(x)


@pytest.mark.parametrize("outside", [False, True])
@training_test(tolerance=BITWISE)
def test_hooks_that_come_and_go_in_a_forward(run: TrainingRun, outside: bool) -> None:
    model = run.shard(HooksItself(outside), units=["first", "second"])
    for index in range(2):
        loss = model(*models.features(index, run.rank)).square().mean()
        loss.backward()
        run.observe(loss, model)
        model.zero_grad()


class CallsTwice(nn.Linear):
    def _call_impl(self, x: Tensor) -> Tensor:
        out: Tensor = super()._call_impl(x) + super()._call_impl(x * 0.5)
        return out


class Scaled(nn.Sequential):
    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = super().__call__(x * 0.5) * 3
        return out


@training_test(tolerance=BITWISE)
def test_modules_with_a_call_of_their_own(run: TrainingRun) -> None:
    dim = models.DIM
    model = run.shard(Scaled(Scaled(nn.Linear(dim, dim)), CallsTwice(dim, dim)), units=["0", "1"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.train(model, optimizer, lambda model, run, index: model(*models.features(index, run.rank)).square().mean())
    if not run.is_reference:
        with graphshard.eager(model):
            eager = model(*models.features(0, run.rank))
        assert torch.equal(eager, model(*models.features(0, run.rank)))


def train_hooked(run: TrainingRun, model: Any, register: Callable[[], Any]) -> None:
    """Three steps; the hook is there in the second."""
    for index in range(3):
        with ExitStack() as hooked:
            if index == 1:
                hooked.callback(register().remove)
            loss = model(*models.features(index, run.rank)).square().mean()
            loss.backward()
        run.observe(loss, model)
        model.zero_grad()


@pytest.mark.parametrize("own", [False, True])
@training_test(tolerance=BITWISE)
def test_hooks_of_all_modules_come_and_go(run: TrainingRun, own: bool) -> None:
    model = run.shard(models.mlps(2))
    for module in model.modules() if own else ():
        module.register_forward_hook(lambda _, inputs, output: output * 1.5)
    train_hooked(run, model, lambda: nn.modules.module.register_module_forward_hook(twice_of_linear))


# Dynamo leaves a call to eager in which a module without hooks of its own has one of these.
@training_test(tolerance=BITWISE, allow_eager=("weight", "bias", "reads parameters outside any graph"))
def test_backward_hooks_of_all_modules_come_and_go(run: TrainingRun) -> None:
    model = run.shard(models.mlps(2))
    train_hooked(run, model, lambda: nn.modules.module.register_module_full_backward_hook(halve_of_linear))


def policies_per_block(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer, cast in zip(model[1].layers, (True, False), strict=True):  # type: ignore[index, union-attr, arg-type]
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=cast))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))


@training_test(tolerance=BITWISE)
def test_equal_blocks_with_policies_of_their_own(run: TrainingRun) -> None:
    model = run.shard(nn.Sequential(nn.Embedding(models.VOCAB, models.DIM), Shift()), annotate=policies_per_block)
    for index in range(2):
        loss = loss_of(model, run, index).float()
        loss.backward()
        run.observe(loss, model)


class Writes(nn.Module):
    """Writes its own parameters in forward, before it reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 5.0))
        self.shift = nn.Parameter(torch.full((3,), 5.0))
        self.layer = nn.Linear(models.DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.scale.data.clamp_(max=1.0)
        with torch.no_grad():
            self.shift.clamp_(max=2.0)
        return (self.layer(x) * self.scale.exp()).sum(-1) * self.shift.exp().sum() * self.scale.sum()


@training_test(backends=("aot_eager", "eager"), tolerance=BITWISE)
def test_write_into_a_parameter_is_seen_by_the_same_forward(run: TrainingRun) -> None:
    model = run.shard(Writes())
    for index in range(2):
        loss = model(*models.features(index, run.rank)).square().mean()
        loss.backward()
        run.observe(loss, model)


@pytest.mark.parametrize("by", ["unshard", "eager engine", "block"])
@training_test()
def test_first_call_with_gathered_parameters(run: TrainingRun, by: str) -> None:
    model = run.shard(models.Decoder(layers=2))
    if by == "unshard":
        model.unshard()
    elif by == "block":
        model.layers[1].unshard()
    elif not run.is_reference:
        with graphshard.eager(model), torch.no_grad():
            model(*models.tokens(0, run.rank))
    loss = loss_of(model, run, 0)
    loss.backward()
    run.observe(loss, model)


class Views(nn.Module):
    """Reads parts of parameters, and checks a value."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.stacked = (
            nn.Linear(models.DIM, 2 * models.DIM),
            nn.Parameter(torch.randn(2, models.DIM, models.DIM)),
        )

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fused.weight.split(models.DIM)
        first, second = self.stacked.unbind(0)
        chosen = F.one_hot((x @ first).argmax(-1), models.DIM).to(x.dtype)
        return (
            F.linear(x, gate) * F.linear(x, up)
            + F.linear(x, self.fused.weight.detach()[: models.DIM])
            + chosen @ second
        )


@training_test()
def test_parts_of_parameters_are_gathered_again(run: TrainingRun) -> None:
    model = run.shard(nn.Sequential(Views(), Views()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(3):
        loss = model(*models.features(index, run.rank)).square().mean()
        loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


@training_test()
def test_gather_launched_before_backward_ends_with_it(run: TrainingRun) -> None:
    model = run.shard(models.Decoder(layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(3):
        loss = loss_of(model, run, index)
        model.layers[0].unshard(async_op=True)  # never awaited
        loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


@training_test()
def test_parameters_frozen_before_backward_get_no_gradient(run: TrainingRun) -> None:
    model = run.shard(models.Decoder(layers=2))
    for index in range(2):
        loss = loss_of(model, run, index)
        model.layers[0].requires_grad_(index == 1)
        loss.backward()
        run.observe(loss, model)
        model.zero_grad()
        model.requires_grad_(True)


@training_test()
def test_no_forward_takes_parameters_from_before_the_optimizer(run: TrainingRun) -> None:
    """Eager FSDP2 needs `reshard()` for it."""
    model = run.shard(models.Decoder(layers=2), reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(3):
        loss = loss_of(model, run, index)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if run.is_reference:
            for unit in (*model.layers, model):
                unit.reshard()
        run.note(f"loss {index}", loss)


@training_test(backends=("aot_eager",))
def test_unit_split_by_a_graph_break_is_named(run: TrainingRun) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(models.DIM, models.DIM), nn.Linear(models.DIM, models.DIM)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            out: Tensor = self.second(x)
            return out

    model = run.shard(Broken())
    loss = model(*models.features(0, run.rank)).square().mean()
    loss.backward()
    run.observe(loss, model)
    if not run.is_reference:
        (note,) = graphshard.report(model).notes
        assert "Broken: its units are used in parts" in note and note in str(graphshard.report(model))


class Backbone(nn.Module):
    """No unit of its own: its parameters are the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(models.DIM, models.DIM)
        self.layers = models.mlps(2)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layers(self.embed(x))
        return hidden


class Looped(nn.Module):
    """Dynamo leaves out a frame that breaks in a loop, and captures what it calls: no graph ends in a break."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = Backbone(), nn.Linear(models.DIM, models.DIM)

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.backbone, self.head):
            torch._dynamo.graph_break()
            x = part(x)
        return x


@training_test(expect_collectives="at_most")
def test_unit_split_by_a_frame_that_is_left_out_is_gathered_once(run: TrainingRun) -> None:
    model = run.shard(Looped())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.train(model, optimizer, lambda model, run, index: model(*models.features(index, run.rank)).square().mean())


@training_test(tolerance=BITWISE)
def test_step_that_users_compile_as_a_whole(run: TrainingRun) -> None:
    """Its frame breaks at `backward`, and is watched by Dynamo while that runs."""
    model: Any = run.shard(models.mlps())

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        return loss

    taken = step if run.is_reference else torch.compile(step, backend="aot_eager")
    for index in range(3):
        run.observe(taken(*models.features(index, run.rank)), model)
        model.zero_grad()
