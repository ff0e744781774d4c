"""Training loops of every pattern: the same losses, gradients and parameters as eager FSDP2, bit for bit."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import graphshard
from graphshard.testing import Bitwise, TrainingRun, Ulps, training_test

BITWISE = Bitwise(equal_zeros="a sum with a zero term loses the sign of zero")


def loss_of(model: nn.Module, run: TrainingRun, index: int) -> Tensor:
    loss: Tensor = model(*models.tokens(index, run.rank)).square().mean()
    return loss


def step(run: TrainingRun, model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
    loss = loss_of(model, run, index)
    loss.backward()
    run.observe(loss, model)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("make", ["sgd", "adamw_foreach", "adamw_fused"])
@training_test(expect_collectives="at_most")
def test_optimizers_see_dtensor_gradients(run: TrainingRun, make: str) -> None:
    model = run.shard(models.Decoder(layers=2))
    optimizers = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
        "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    }
    optimizer = optimizers[make](model.parameters())
    for index in range(3):
        step(run, model, optimizer, index)


@pytest.mark.parametrize("reshard", [True, False, None])
@training_test(expect_collectives="at_most")
def test_reshard_after_forward_changes_no_bit(run: TrainingRun, reshard: bool | None) -> None:
    model = run.shard(models.Decoder(layers=2), reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(3):
        step(run, model, optimizer, index)


@training_test(expect_collectives="at_most", tolerance=BITWISE, timeout_s=240)
def test_microbatches_synchronize_in_any_pattern(run: TrainingRun) -> None:
    model = run.shard(models.Decoder(layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index, sync in enumerate(itertools.product([False, True], repeat=3)):
        for microbatch, synchronized in enumerate([*sync, True]):
            model.set_requires_gradient_sync(synchronized)
            loss = loss_of(model, run, 4 * index + microbatch)
            loss.backward()
            run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


@training_test(expect_collectives="at_most")
def test_one_unit_may_synchronize_alone(run: TrainingRun) -> None:
    model = run.shard(models.Decoder(layers=3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(2):
        model.set_requires_gradient_sync(False)
        model.layers[1].set_requires_gradient_sync(True)
        loss = loss_of(model, run, 2 * index)
        loss.backward()
        run.observe(loss, model)
        model.set_requires_gradient_sync(False, recurse=False)
        for layer in model.layers:
            layer.set_requires_gradient_sync(True)
        loss_of(model, run, 2 * index + 1).backward()
        model.set_requires_gradient_sync(True)
        loss = loss_of(model, run, 2 * index + 2)
        loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


@training_test()
def test_flag_is_read_when_backward_runs(run: TrainingRun) -> None:
    model = run.shard(models.Decoder(layers=2))
    model.set_requires_gradient_sync(True)
    first = loss_of(model, run, 0)
    model.set_requires_gradient_sync(False)
    first.backward()
    run.observe(first, model)
    second = loss_of(model, run, 1)
    model.set_requires_gradient_sync(True)
    second.backward()
    run.observe(second, model)


class Branches(nn.Module):
    """Two layers, of which a forward takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(models.DIM, models.DIM)
        self.branches = nn.ModuleList(nn.Linear(models.DIM, 3) for _ in range(2))

    def forward(self, x: Tensor, branch: int) -> Tensor:
        out: Tensor = self.branches[branch](torch.tanh(self.body(x)))
        return out


@training_test(allow_eager=("branches.0",))
def test_accumulated_gradient_of_a_unit_the_last_backward_misses_is_reduced(run: TrainingRun) -> None:
    model = run.shard(Branches())
    for microbatch, branch in enumerate([0, 1]):
        model.set_requires_gradient_sync(microbatch == 1)
        loss = model(*models.features(microbatch, run.rank), branch).square().mean()
        loss.backward()
        run.observe(loss, model)


@training_test()
def test_two_forwards_then_two_backwards(run: TrainingRun) -> None:
    model = run.shard(models.Decoder(layers=2))
    for index in range(2):
        losses = [loss_of(model, run, 2 * index + i) for i in range(2)]
        losses[0].backward()
        run.observe(losses[0], model)
        losses[1].backward()
        run.observe(losses[1], model)


@training_test(
    tolerance=Ulps(8, "eager reduces the root's sum of both gradients once, each program reduces its own", atol=1e-9)
)
def test_two_forwards_then_one_backward(run: TrainingRun) -> None:
    model = run.shard(models.Decoder(layers=2))
    for index in range(2):
        loss = loss_of(model, run, 2 * index) + loss_of(model, run, 2 * index + 1)
        loss.backward()
        run.observe(loss, model)


@training_test()
def test_zeroed_gradients_are_accumulated_into(run: TrainingRun) -> None:
    model = run.shard(models.Decoder(layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(4):
        loss = loss_of(model, run, index)
        loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=index % 2 == 0)


@training_test()
def test_evaluation_between_steps(run: TrainingRun) -> None:
    torch.manual_seed(3)
    model = run.shard(models.Dropped())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(3):
        model.train()
        torch.manual_seed(index)
        loss = model(*models.features(index, run.rank)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            run.observe(loss, model, outputs=model(*models.features(100, run.rank)))


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(models.DIM, models.DIM) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@training_test()
def test_two_models_of_one_class_keep_their_policies(run: TrainingRun) -> None:
    first = Shift()
    second = copy.deepcopy(first)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    pair = (run.shard(first, reshard_after_forward=False), run.shard(second, mp_policy=half))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in pair]
    for index in range(2):
        for model, optimizer in zip(pair, optimizers, strict=True):
            loss = model(*models.features(index, run.rank)).square().mean()
            loss.backward()
            run.observe(loss, model)
            optimizer.step()
            optimizer.zero_grad()


POLICIES = {
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "bf16, reduce f32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "f32, reduce bf16": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
    "reduce f64": MixedPrecisionPolicy(reduce_dtype=torch.float64),
    "no input casts": MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False),
    "all": MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32),
}


@pytest.mark.parametrize("policy", POLICIES)
@training_test(expect_collectives="at_most", tolerance=BITWISE)
def test_mixed_precision(run: TrainingRun, policy: str) -> None:
    model = run.shard(nn.Sequential(nn.Embedding(models.VOCAB, models.DIM), Shift()), mp_policy=POLICIES[policy])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(2):
        for synchronized in (False, True):
            model.set_requires_gradient_sync(synchronized)
            loss = loss_of(model, run, 2 * index + synchronized).float()
            loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


def blocks_and_root(model: nn.Module, mesh: DeviceMesh) -> None:
    assert isinstance(model, models.Decoder)
    fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False)
    for i, layer in enumerate(model.layers):
        fully_shard(layer.attention, mesh=mesh)
        fully_shard(layer, mesh=mesh, reshard_after_forward=bool(i % 2))
    fully_shard(model, mesh=mesh)


@training_test(expect_collectives="at_most")
def test_annotated_model_keeps_its_units(run: TrainingRun) -> None:
    model = run.shard(models.Decoder(layers=3), annotate=blocks_and_root)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(3):
        step(run, model, optimizer, index)


def blocks_only(model: nn.Module, mesh: DeviceMesh) -> None:
    assert isinstance(model, models.Decoder)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)


@training_test()
def test_annotated_blocks_without_a_root(run: TrainingRun) -> None:
    model = run.shard(models.Decoder(layers=2), annotate=blocks_only)
    for index in range(2):
        loss = loss_of(model, run, index)
        loss.backward()
        run.observe(loss, model)


@pytest.mark.parametrize("regions", ["model", "unit"])
@training_test(tolerance=BITWISE)
def test_regions_change_no_bit(run: TrainingRun, regions: str) -> None:
    model = run.shard(models.Decoder(layers=3), **({} if run.is_reference else {"regions": regions}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(3):
        step(run, model, optimizer, index)


@training_test(world_size=1)
def test_one_rank_communicates_nothing(run: TrainingRun) -> None:
    model = run.shard(models.Decoder(layers=2, tied=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(2):
        step(run, model, optimizer, index)
    if not run.is_reference:
        assert not any(graphshard.report(model).collectives.values())


@training_test(tolerance=BITWISE)
def test_frozen_and_thawed_between_steps(run: TrainingRun) -> None:
    model = run.shard(models.Decoder(layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(4):
        model.layers[0].requires_grad_(index % 2 == 0)
        step(run, model, optimizer, index)


@training_test()
def test_dtype_changes_after_sharding(run: TrainingRun) -> None:
    model: Any = run.shard(Shift())
    model.to(torch.float64)
    for index in range(2):
        loss = model(models.features(index, run.rank)[0].double()).square().mean()
        loss.backward()
        run.observe(loss, model)


class Softplus(nn.Module):
    """Its gradient comes transposed: the kernel keeps that layout, where torch's tracing foresees a contiguous one."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.mix = nn.Linear(models.DIM, 4), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        decay = nn.functional.softplus(self.decay(x)).transpose(1, 2).contiguous()
        mixed: Tensor = self.mix(decay)
        return mixed


@training_test(tolerance=BITWISE)
def test_gradient_may_have_other_strides_than_tracing_foresees(run: TrainingRun) -> None:
    model = run.shard(Softplus())
    loss = model(torch.randn(2, 6, models.DIM, generator=models.generator(0, run.rank))).square().mean()
    loss.backward()
    run.observe(loss, model)


@training_test()
def test_gradients_flow_to_inputs(run: TrainingRun) -> None:
    model = run.shard(Shift())
    x = models.features(0, run.rank)[0].requires_grad_()
    loss = model(x).square().mean()
    (grad,) = torch.autograd.grad(loss, x, retain_graph=False)
    run.observe(loss, model, outputs=grad)
