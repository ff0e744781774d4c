"""FSDP2's own engine between compiled calls: asked for, or since something sees each operator."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import models
import pytest
import torch
from test_calls import batch, mesh
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, register_fsdp_forward_method
from torch.distributed.tensor.debug import CommDebugMode

import graphshard
from graphshard.testing import TrainingRun, WorkerPool, training_test

pytestmark = pytest.mark.row("X10")


def eager_in(run: TrainingRun, model: Any) -> Any:
    return nullcontext(model) if run.is_reference else graphshard.eager(model)


@training_test(allow_eager=("TorchDispatchMode",))
def test_call_under_a_dispatch_mode_between_compiled_calls(run: TrainingRun) -> None:
    model = run.shard(models.Decoder(layers=2))
    for index in range(3):
        with CommDebugMode() if index == 1 else nullcontext():
            loss = model(*models.tokens(index, run.rank)).square().mean()
            loss.backward()
        run.observe(loss, model)


TRANSFORMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).square().mean())(x),
    "vmap": lambda model, x: torch.vmap(model)(x),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x.cos(),))[1],
    "jacrev": lambda model, x: torch.func.jacrev(model)(x[:1]),
}


@pytest.mark.skipif(torch.__version__ < "2.12", reason="eager FSDP2 fails under transforms with torch 2.11")
@pytest.mark.parametrize("transform", TRANSFORMS)
@training_test(allow_eager=("a transform of torch.func",))
def test_call_under_a_transform_between_compiled_calls(run: TrainingRun, transform: str) -> None:
    model = run.shard(models.mlps(3))
    for index in range(2):
        (x,) = models.features(index, run.rank)
        seen = TRANSFORMS[transform](model, x)
        if transform == "vmap":  # FSDP2 has no gradients of gradients
            seen.square().mean().backward()
        loss = model(x).square().mean()
        loss.backward()
        run.observe(loss, model, outputs=seen)


def values_of_a_functional_call() -> None:
    model = graphshard.compile(models.mlps(3), mesh(), backend="aot_eager")
    (x,) = models.features(0, torch.distributed.get_rank())
    want = model(x)

    def run(values: dict[str, Tensor]) -> Tensor:
        loss: Tensor = torch.func.functional_call(model, values, (x,)).sum()
        return loss

    doubled = {name: param.detach() * 2 for name, param in model.named_parameters()}
    for call in (run, torch.func.grad(run)):
        with pytest.raises(RuntimeError, match=r"parameter '0.*' was replaced after compile"):
            call(doubled)
    torch.testing.assert_close(model(x), want, rtol=0, atol=0)


def test_values_of_a_functional_call_are_refused(two_ranks: WorkerPool) -> None:
    two_ranks.run(values_of_a_functional_call)


@training_test()
def test_engines_alternate(run: TrainingRun) -> None:
    model = run.shard(models.Decoder(layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(5):
        with eager_in(run, model) if index % 2 else nullcontext(model) as same:
            assert same is model
            loss = model(*models.tokens(index, run.rank)).square().mean()
            loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


# Of the microbatches of a step, which run in eager FSDP2.
ALTERNATIONS = {"eager between": (False, True, False), "eager last": (False, False, True), "eager first": (True, False)}
LOW = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


@pytest.mark.parametrize("policy", [{}, LOW], ids=["fp32", "bf16"])
@pytest.mark.parametrize("alternation", ALTERNATIONS)
@training_test(allow_eager=("TorchDispatchMode",))
def test_engines_alternate_within_an_accumulation(run: TrainingRun, alternation: str, policy: dict[str, Any]) -> None:
    model = run.shard(models.Decoder(layers=2), **policy)
    microbatches = ALTERNATIONS[alternation]
    for step in range(2):
        for number, eager in enumerate(microbatches):
            model.set_requires_gradient_sync(number == len(microbatches) - 1)
            with CommDebugMode() if eager else nullcontext():
                loss = model(*models.tokens(10 * step + number, run.rank)).square().mean()
            loss.backward()  # without the mode, behind a forward of FSDP2's
        run.observe(loss, model)
        model.zero_grad()


@training_test(allow_eager=("TorchDispatchMode",))
def test_engines_alternate_while_a_unit_is_not_called(run: TrainingRun) -> None:
    model = run.shard(models.Decoder(layers=2))
    model.set_requires_gradient_sync(False)
    model(*models.tokens(0, run.rank)).square().mean().backward()
    with CommDebugMode():
        model.layers[0](*models.sequences(0, run.rank)).square().mean().backward()
    model.set_requires_gradient_sync(True)
    loss = model(*models.tokens(1, run.rank)).square().mean()
    loss.backward()
    run.observe(loss, model)


def backward_in_the_other(run: TrainingRun, model: Any, batch: Callable[[int], tuple[Tensor]]) -> Tensor:
    loss: Tensor = model(*batch(0)).square().mean()
    with eager_in(run, model):
        loss.backward()
        model.set_requires_gradient_sync(True)
        loss = model(*batch(1)).square().mean()
        loss.backward()
    return loss


def forwards_of_both(eager_first: bool, run: TrainingRun, model: Any, batch: Callable[[int], tuple[Tensor]]) -> Tensor:
    losses = []
    for number in range(2):
        with eager_in(run, model) if eager_first == (number == 0) else nullcontext():
            losses.append(model(*batch(number)).square().mean())
    losses[0].backward()
    model.set_requires_gradient_sync(True)
    losses[1].backward()
    return losses[1]


def evaluation_between(run: TrainingRun, model: Any, batch: Callable[[int], tuple[Tensor]]) -> Tensor:
    model(*batch(0)).square().mean().backward()
    with eager_in(run, model):
        loss: Tensor = model(*batch(1)).square().mean()
    with torch.no_grad():
        model(*batch(2))
    model.set_requires_gradient_sync(True)
    loss.backward()
    return loss


CHANGES = {
    "backward in the other engine": backward_in_the_other,
    "eager forward first": partial(forwards_of_both, True),
    "compiled forward first": partial(forwards_of_both, False),
    "evaluation between": evaluation_between,
}


@pytest.mark.parametrize("change", CHANGES)
@training_test()
def test_engines_change_between_forward_and_backward(run: TrainingRun, change: str) -> None:
    model: Any = run.shard(models.Decoder(layers=2))
    for step in range(2):
        model.set_requires_gradient_sync(False)
        loss = CHANGES[change](run, model, lambda number: models.tokens(10 * step + number, run.rank))  # noqa: B023
        run.observe(loss, model)
        model.zero_grad()


class Encoding(nn.Sequential):
    def encode(self, x: Tensor) -> Tensor:
        found: Tensor = self[0](x)
        return found * 2


@training_test()
def test_engines_alternate_around_a_registered_method(run: TrainingRun) -> None:
    model: Any = run.shard(Encoding(nn.Linear(models.DIM, models.DIM), nn.Linear(models.DIM, models.DIM)), units=[])
    register_fsdp_forward_method(model, "encode")
    for step in range(2):
        model.set_requires_gradient_sync(False)
        model.encode(*models.features(2 * step, run.rank)).square().mean().backward()
        model.set_requires_gradient_sync(True)
        with eager_in(run, model):
            loss = model.encode(*models.features(2 * step + 1, run.rank)).square().mean()
            loss.backward()
        run.observe(loss, model)
        model.zero_grad()


def switch_while_partial() -> None:
    mesh_2d = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model: Any = graphshard.compile(models.Decoder(layers=2), mesh_2d, backend="aot_eager")

    def step() -> None:
        model(*batch()).square().mean().backward()

    model.set_requires_all_reduce(False)
    step()
    with pytest.raises(RuntimeError, match=r"graphshard holds gradients of \d+ .*embed.weight.* not over their copies"):
        graphshard.eager(model).__enter__()
    model.set_requires_all_reduce(True)
    step()
    with graphshard.eager(model):
        model.set_requires_all_reduce(False)
        step()
    with pytest.raises(RuntimeError, match=r"eager FSDP2 holds gradients of .*set_requires_all_reduce"):
        step()


def test_switching_engines_while_gradients_are_partly_reduced_is_an_error(four_ranks: WorkerPool) -> None:
    four_ranks.run(switch_while_partial)
