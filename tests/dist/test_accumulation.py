"""Gradients of several microbatches: with and without communication, in any order, on every kind of mesh."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import models
import pytest
import torch
from test_models import INDUCTOR
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from graphshard.testing import Bitwise, TrainingRun, training_test

BITWISE = Bitwise(equal_zeros="a sum with a zero term loses the sign of zero")
OFFLOAD = CPUOffloadPolicy(pin_memory=False)
MLPS = 3
MICROBATCHES = 3


def loss_of(model: nn.Module, run: TrainingRun, index: int) -> Tensor:
    loss: Tensor = model(*models.features(index, run.rank)).square().mean()
    return loss


def check_counts(run: TrainingRun, *, all_gather: int, reduce_scatter: int, all_reduce: int = 0) -> None:
    """Eager FSDP2 launches exactly these, a compiled model at most as many all-gathers."""
    _, seen = run.counts[-1]
    assert (seen["reduce_scatter"], seen["all_reduce"]) == (reduce_scatter, all_reduce)
    assert seen["all_gather"] == all_gather if run.is_reference else seen["all_gather"] <= all_gather


class Pattern(NamedTuple):
    """Which units leave their gradients for the last microbatch, and what is kept gathered between microbatches.

    `part`: what is left unreduced: with `scatter_only` the all-reduces alone.
    """

    part: str
    reshard: bool | int
    reshard_after_backward: bool = True
    scatter_only: bool = False
    offload: OffloadPolicy | None = None

    def __str__(self) -> str:
        kept = "" if self.reshard_after_backward else ", kept"
        return f"{self.part}, {self.reshard}{kept}{', scatter' * self.scatter_only}{', offload' * bool(self.offload)}"

    def set_flags(self, model: Any, is_last: bool) -> None:
        changed = [model] if self.part != "some" else list(model)[1:MLPS]
        for module in changed:
            recurse = {"recurse": self.part != "root"}
            if self.scatter_only:
                module.set_requires_all_reduce(is_last, **recurse)
            else:
                module.set_requires_gradient_sync(is_last, **recurse)
            if not self.reshard_after_backward:
                module.set_reshard_after_backward(is_last, **recurse)

    def expected(self, hsdp: bool) -> dict[str, int]:
        units, left_out = MLPS + 1, {"all": MLPS + 1, "root": 1, "some": MLPS - 1}[self.part]
        reductions = units + (units - left_out) * (MICROBATCHES - 1)
        scatters = units * MICROBATCHES if self.scatter_only else reductions
        if self.reshard is not False:
            gathers = 2 * units * MICROBATCHES
        elif self.reshard_after_backward:
            gathers = units * MICROBATCHES
        else:
            gathers = units + (units - left_out) * (MICROBATCHES - 1)
        return {"all_gather": gathers, "reduce_scatter": scatters, "all_reduce": reductions if hsdp else 0}


def accumulate(run: TrainingRun, pattern: Pattern) -> None:
    policy = {} if pattern.offload is None else {"offload_policy": pattern.offload}

    def annotate(model: nn.Module, mesh: DeviceMesh) -> None:
        for mlp in list(model.children())[1:]:
            fully_shard(mlp, mesh=mesh, reshard_after_forward=pattern.reshard, **policy)
        fully_shard(model, mesh=mesh, reshard_after_forward=pattern.reshard, **policy)

    model = run.shard(models.mlps(), annotate=annotate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(2):
        with run.counted("second step") if index else nullcontext():
            for microbatch in range(MICROBATCHES):
                pattern.set_flags(model, microbatch == MICROBATCHES - 1)
                loss = loss_of(model, run, MICROBATCHES * index + microbatch)
                loss.backward()
                run.note(f"loss {index}, {microbatch}", loss)
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=bool(index % 2))
    check_counts(run, **pattern.expected(hsdp=run.mesh.ndim == 2))


@pytest.mark.row("S30")
@pytest.mark.parametrize(
    "pattern",
    [
        Pattern("all", False),
        Pattern("all", True, offload=OFFLOAD),
        Pattern("root", False, reshard_after_backward=False),
        Pattern("some", True),
    ],
    ids=str,
)
@training_test(tolerance=BITWISE)
def test_units_left_unsynchronized_are_reduced_once(run: TrainingRun, pattern: Pattern) -> None:
    accumulate(run, pattern)


@pytest.mark.row("S30")
@training_test(world_size=4, tolerance=BITWISE)
def test_shards_over_a_smaller_group_accumulate(run: TrainingRun) -> None:
    accumulate(run, Pattern("all", 2))


@pytest.mark.row("S30")
@pytest.mark.parametrize(
    "pattern",
    [
        Pattern("all", True, scatter_only=True),
        Pattern("root", False, reshard_after_backward=False),
        Pattern("some", False, scatter_only=True, offload=OFFLOAD),
    ],
    ids=str,
)
@training_test(world_size=4, mesh_shape=(2, 2), mesh_axes=("dp_replicate", "dp_shard"), tolerance=BITWISE)
def test_hybrid_units_left_unsynchronized_are_reduced_once(run: TrainingRun, pattern: Pattern) -> None:
    accumulate(run, pattern)


@pytest.mark.row("S30")
@training_test(world_size=4, mesh_shape=(2, 2), mesh_axes=("dp_replicate", "dp_shard"), tolerance=BITWISE)
def test_unreduced_and_scattered_gradients_add_up(run: TrainingRun) -> None:
    """First nothing is reduced, then only scattered, then all-reduced: each buffer joins the next."""
    flags = [(False, False), (True, False), (True, False), (True, True)]
    model: Any = run.shard(models.mlps(), annotate=shard_each_mlp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(2):
        with run.counted("second step") if index else nullcontext():
            for microbatch, (scatter, reduce) in enumerate(flags):
                model.set_requires_gradient_sync(scatter)
                model.set_requires_all_reduce(reduce)
                loss = loss_of(model, run, 4 * index + microbatch)
                loss.backward()
                run.note(f"loss {index}, {microbatch}", loss)
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()
    units = MLPS + 1
    check_counts(run, all_gather=8 * units - 4, reduce_scatter=3 * units, all_reduce=units)


def shard_each_mlp(model: nn.Module, mesh: DeviceMesh) -> None:
    for mlp in list(model.children())[1:]:
        fully_shard(mlp, mesh=mesh)
    fully_shard(model, mesh=mesh)


def shard_each_mlp_once(model: nn.Module, mesh: DeviceMesh) -> None:
    for mlp in list(model.children())[1:]:
        fully_shard(mlp, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


@pytest.mark.row("S31")
@pytest.mark.parametrize("unshard_first", [False, True])
@training_test(tolerance=BITWISE)
def test_parameters_stay_gathered_over_the_microbatches_of_a_pipeline(run: TrainingRun, unshard_first: bool) -> None:
    model: Any = run.shard(models.mlps(), annotate=shard_each_mlp_once)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(2):
        with run.counted("second step") if index else nullcontext():
            if unshard_first:
                for module in model.modules():
                    if isinstance(module, FSDPModule):
                        module.unshard(async_op=True)
            for microbatch in range(MICROBATCHES):
                is_last = microbatch == MICROBATCHES - 1
                model.set_requires_gradient_sync(is_last)
                model.set_is_last_backward(is_last)
                model.set_reshard_after_backward(is_last)
                loss = loss_of(model, run, MICROBATCHES * index + microbatch)
                loss.backward()
                run.note(f"loss {index}, {microbatch}", loss)
        run.note_registration(f"step {index}", model)
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()
    check_counts(run, all_gather=MLPS + 1, reduce_scatter=MLPS + 1)


def replicate_each_mlp(model: nn.Module, mesh: DeviceMesh) -> None:
    for mlp in list(model.children())[1:]:
        replicate(mlp, mesh=mesh)
    replicate(model, mesh=mesh)


def shard_with_offload(model: nn.Module, mesh: DeviceMesh) -> None:
    for mlp in list(model.children())[1:]:
        fully_shard(mlp, mesh=mesh, offload_policy=OFFLOAD)
    fully_shard(model, mesh=mesh, offload_policy=OFFLOAD)


STRATEGIES = {"sharded": shard_each_mlp, "kept": shard_each_mlp_once, "replicated": replicate_each_mlp}
# "-": that many microbatches without communication; "+": with it. The last of all is synchronized in any case.
QUIET_FIRST, SYNC_FIRST = "---+++---", "+++---+++"


def sum_of_squares(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().sum()
    return loss


def accumulated_equals_one_batch(run: TrainingRun, annotate: Any, pattern: str) -> None:
    """The sum of the losses, and the gradients, are those of one backward of all microbatches at once."""
    x = torch.cat([models.features(index, run.rank)[0] for index in range(len(pattern))])
    model: Any = run.shard(models.mlps(), annotate=annotate)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    for _ in range(2):
        whole = sum_of_squares(model, x)
        whole.backward()
        run.observe(whole, model)
        wanted = [local(p.grad).clone() for p in model.parameters()]
        optimizer.zero_grad()
        total = torch.zeros(())
        for microbatch, mark in enumerate(pattern):
            model.set_requires_gradient_sync(mark == "+" or microbatch == len(pattern) - 1)
            loss = sum_of_squares(model, x.chunk(len(pattern))[microbatch])
            loss.backward()
            total += loss.detach()
        torch.testing.assert_close(total, whole.detach())
        for parameter, want in zip(model.parameters(), wanted, strict=True):
            assert (parameter.grad.device, parameter.grad.dtype) == (parameter.device, parameter.dtype)
            assert parameter.grad.shape == parameter.shape
            torch.testing.assert_close(local(parameter.grad), want, rtol=1e-4, atol=1e-4)
        run.observe(total, model)
        optimizer.step()
        optimizer.zero_grad()


def local(tensor: Any) -> Tensor:
    shard: Tensor = tensor.to_local()
    return shard


@pytest.mark.row("A1")
@pytest.mark.parametrize("strategy", STRATEGIES)
@training_test(tolerance=BITWISE)
def test_quiet_microbatches_around_synchronized_ones_equal_one_batch(run: TrainingRun, strategy: str) -> None:
    accumulated_equals_one_batch(run, STRATEGIES[strategy], QUIET_FIRST)


@pytest.mark.row("A2")
@pytest.mark.parametrize("strategy", STRATEGIES)
@training_test(tolerance=BITWISE)
def test_synchronized_microbatches_around_quiet_ones_equal_one_batch(run: TrainingRun, strategy: str) -> None:
    accumulated_equals_one_batch(run, STRATEGIES[strategy], SYNC_FIRST)


@pytest.mark.row("A3")
@training_test(tolerance=BITWISE)
def test_offloaded_microbatches_equal_one_batch(run: TrainingRun) -> None:
    accumulated_equals_one_batch(run, shard_with_offload, "---")


@training_test(backends=("inductor",), tolerance=INDUCTOR)
def test_gradients_in_other_strides_are_accumulated(run: TrainingRun) -> None:
    """Inductor's convolutions hand out the gradients of their weights with the channels last."""
    model = run.shard(nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.Conv2d(8, 8, 3, bias=False)))
    for microbatch in range(MICROBATCHES):
        model.set_requires_gradient_sync(microbatch == MICROBATCHES - 1)
        loss = model(*models.images(microbatch, run.rank)).square().mean()
        loss.backward()
    run.observe(loss, model)


class Shifted(nn.Module):
    """The gradients of both parameters are what `backward` is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.randn(4, models.DIM)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.one + self.other


@training_test(tolerance=BITWISE)
def test_gradients_that_are_an_argument_of_backward_leave_it_as_it_is(run: TrainingRun) -> None:
    torch.manual_seed(0)
    model: Any = run.shard(Shifted())
    given = [torch.randn(4, models.DIM, generator=models.generator(index, run.rank)) for index in range(3)]
    for index, grad in enumerate(given):
        model.set_requires_gradient_sync(index == 2)
        before = grad.clone()
        model(torch.ones(4, models.DIM)).backward(grad)
        assert torch.equal(grad, before)
        if index < 2:
            grad.zero_()  # the caller's own
    run.observe(grad.sum(), model)


@pytest.mark.parametrize("syncs", [(True, True), (False, True), (False, False, True)])
@training_test(tolerance=BITWISE, backends=("aot_eager", "eager"))
def test_parameter_frozen_between_forward_and_backward(run: TrainingRun, syncs: tuple[bool, ...]) -> None:
    model: Any = run.shard(models.mlps(2), units=["1", "2"])
    for index, sync in enumerate(syncs):
        model.set_requires_gradient_sync(sync)
        loss = loss_of(model, run, index)
        if index == 1:
            model[1].up.weight.requires_grad_(False)
        loss.backward()
        run.observe(loss, model)


@pytest.mark.parametrize("together", [False, True])
@training_test(tolerance=BITWISE)
def test_parameter_frozen_between_two_forwards(run: TrainingRun, together: bool) -> None:
    model: Any = run.shard(models.mlps(2), units=["1", "2"])
    first = loss_of(model, run, 0)
    model[1].up.weight.requires_grad_(False)
    second = loss_of(model, run, 1)
    for loss in [first + second] if together else [first, second]:
        loss.backward()
        run.observe(loss, model)


def _switch(parameter: nn.Parameter) -> None:
    parameter.requires_grad_(not parameter.requires_grad)


@pytest.mark.parametrize("strategy", ["fully_shard", "replicate"])
@pytest.mark.parametrize("trained_first", [True, False])
@training_test(tolerance=BITWISE)
def test_parameter_frozen_or_trained_while_it_stays_gathered(
    run: TrainingRun, strategy: str, trained_first: bool
) -> None:
    model: Any = models.mlps(2)
    model[0].requires_grad_(trained_first)
    model = run.shard(model, units=["1", "2"], strategy=strategy)
    norm, shards = model[0], dict(model[0].named_parameters())
    with torch.no_grad():
        loss_of(model, run, 0)  # the root stays gathered, until the first backward
    _switch(norm.weight)
    _switch(shards["bias"])
    for index in range(3):
        loss = loss_of(model, run, index)
        if index == 1:  # between forward and backward
            _switch(norm.weight)
        loss.backward()
        run.observe(loss, model)


@pytest.mark.parametrize("trained_again", [False, True])
@training_test(tolerance=BITWISE)
def test_parameter_frozen_with_a_gradient_of_an_earlier_microbatch(run: TrainingRun, trained_again: bool) -> None:
    model: Any = run.shard(models.mlps(2), units=["1", "2"])
    for index in range(4):
        model.set_requires_gradient_sync(index in (1, 3))
        if index == 1:
            model[1].up.weight.requires_grad_(False)
        if index == 2:
            model[1].up.weight.requires_grad_(trained_again)
        loss = loss_of(model, run, index)
        loss.backward()
        run.observe(loss, model)
