"""Policies of units: mixed precision, parameters of several dtypes, CPU offload, ignored parameters."""

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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from graphshard.testing import TrainingRun, training_test

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def train(run: TrainingRun, model: nn.Module, steps: int = 3) -> None:
    """Steps on tokens, each observed; launches are counted once programs exist."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(steps):
        with run.counted(f"step {index}") if index else nullcontext():
            loss = loss_of(model, run, index).float()
            loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


# --- mixed precision

REDUCTIONS = (
    MixedPrecisionPolicy(reduce_dtype=F16),
    MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F16),
    MixedPrecisionPolicy(param_dtype=F16),
    MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F64),
)


def reductions_of_each_unit(model: nn.Module, mesh: DeviceMesh) -> None:
    for block, policy in zip(list(model.children())[1:], REDUCTIONS, strict=True):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)


@pytest.mark.skipif(
    not models.ROUNDS_GRADIENTS, reason="torch 2.15 reduces some gradients without rounding them to param_dtype"
)
@pytest.mark.row("S6")
@training_test(world_size=4, tolerance=BITWISE)
def test_reductions_that_divide_before_and_after_the_sum(run: TrainingRun) -> None:
    model = run.shard(models.mlps(len(REDUCTIONS)), annotate=reductions_of_each_unit)
    for index in range(2):
        with run.counted(f"step {index}") if index else nullcontext():
            loss = model(*models.features(index, run.rank)).float().square().mean()
            loss.backward()
        run.observe(loss, model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        model.zero_grad()


def policy_of_each_unit(model: nn.Module, mesh: DeviceMesh) -> None:
    assert isinstance(model, models.Decoder)
    policies = (
        MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32, output_dtype=F32),
        MixedPrecisionPolicy(reduce_dtype=BF16),
        MixedPrecisionPolicy(param_dtype=F64, output_dtype=F32),
    )
    for layer, policy in zip(model.layers, policies, strict=True):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model.head, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=True))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(output_dtype=F64))


@pytest.mark.skipif(
    not models.ROUNDS_GRADIENTS, reason="torch 2.15 reduces some gradients without rounding them to param_dtype"
)
@pytest.mark.row("S18")
@training_test(tolerance=BITWISE)
def test_each_unit_has_its_policy(run: TrainingRun) -> None:
    model = run.shard(models.Decoder(), annotate=policy_of_each_unit)
    train(run, model)
    with torch.no_grad():
        assert model(*models.tokens(0, run.rank)).dtype == F64


def module_of_another_dtype(model: nn.Module, mesh: DeviceMesh) -> None:
    """A unit in full precision inside one in bf16: its inputs are cast up, its outputs down."""
    assert isinstance(model, models.Decoder)
    half = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)
    for layer in model.layers:
        fully_shard(layer.norm2, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=F32, output_dtype=BF16))
        fully_shard(layer, mesh=mesh, mp_policy=half)
    fully_shard(model, mesh=mesh, mp_policy=half)


@pytest.mark.skipif(
    not models.ROUNDS_GRADIENTS, reason="torch 2.15 reduces some gradients without rounding them to param_dtype"
)
@pytest.mark.row("S18")
@training_test(tolerance=BITWISE)
def test_nested_unit_computes_in_its_own_dtype(run: TrainingRun) -> None:
    train(run, run.shard(models.Decoder(layers=2), annotate=module_of_another_dtype))


def outputs_in_double(model: nn.Module, mesh: DeviceMesh) -> None:
    assert isinstance(model, models.Nested)
    fully_shard(model.a, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, output_dtype=F32))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(BF16, F32, output_dtype=F64))
    model.b.register_forward_pre_hook(lambda module, args: (args[0].to(module.weight.dtype),))


@pytest.mark.row("S18")
@training_test(tolerance=BITWISE)
def test_nested_inputs_and_outputs_are_cast(run: TrainingRun) -> None:
    model = run.shard(models.Nested(), annotate=outputs_in_double)
    for index in range(3):
        args, kwargs = models.nested_inputs(index, run.rank)
        outputs = model(*args, **kwargs)
        assert outputs["logits"].dtype == outputs["states"][1][0].dtype == F64
        loss = outputs["logits"].square().mean()
        loss.backward()
        run.observe(loss, model, outputs=outputs)
        model.zero_grad()


# --- parameters of several dtypes


@training_test(tolerance=BITWISE)
def test_units_of_different_dtypes(run: TrainingRun) -> None:
    model = models.Decoder()
    for layer, dtype in zip(model.layers, (F32, BF16, F64), strict=True):
        layer.to(dtype)
    for layer in model.layers:  # casts at the units' borders are the model's own
        layer.register_forward_pre_hook(lambda layer, args: (args[0].to(layer.up.weight.dtype),))
        layer.register_forward_hook(lambda _, args, output: output.float())
    train(run, run.shard(model, units=[models.DecoderBlock]))


class Adapted(nn.Module):
    """A frozen weight in bf16, a frozen table of integers, and trainable parameters in fp32: one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(models.DIM, models.DIM, bias=False, dtype=BF16).requires_grad_(False)
        table = torch.randint(-8, 8, (models.DIM + 1, models.DIM), dtype=torch.int8)
        self.table = nn.Parameter(table, requires_grad=False)
        self.down = nn.Linear(models.DIM, 3, bias=False)
        self.up = nn.Linear(3, models.DIM)

    def forward(self, x: Tensor) -> Tensor:
        quantized = x @ self.table[1:].to(x.dtype) / 64
        frozen = self.base(x.to(self.base.weight.dtype)).to(x.dtype)
        return x + torch.tanh(frozen + quantized + self.up(self.down(x)))


@pytest.mark.skipif(torch.__version__ < "2.12", reason="FSDP2 of torch 2.11 cannot shard integers")
@pytest.mark.parametrize("param_dtype", [None, BF16], ids=str)
@training_test(tolerance=BITWISE)
def test_frozen_parameters_of_other_dtypes_share_a_bucket(run: TrainingRun, param_dtype: torch.dtype | None) -> None:
    model = nn.Sequential(nn.Embedding(models.VOCAB, models.DIM), Adapted(), Adapted())
    train(run, run.shard(model, units=[Adapted], mp_policy=MixedPrecisionPolicy(param_dtype, F32)))


# --- CPU offload

PINNED = pytest.param(
    True, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="memory is pinned for an accelerator")
)


@pytest.mark.row("S10")
@pytest.mark.parametrize("pin_memory", [False, PINNED])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@training_test()
def test_parameters_offloaded_to_cpu(run: TrainingRun, tied: bool, pin_memory: bool) -> None:
    model = run.shard(
        models.Decoder(tied=tied),
        offload_policy=CPUOffloadPolicy(pin_memory=pin_memory),
        reshard_after_forward=True,
    )
    train(run, model)
    run.note("devices", [p.to_local().device.type for p in model.parameters()])  # type: ignore[attr-defined]


@pytest.mark.skipif(
    not models.ROUNDS_GRADIENTS, reason="torch 2.15 reduces some gradients without rounding them to param_dtype"
)
@pytest.mark.row("S10")
@training_test()
def test_offloaded_parameters_accumulate_in_mixed_precision(run: TrainingRun) -> None:
    model = run.shard(
        models.Decoder(layers=2),
        offload_policy=CPUOffloadPolicy(pin_memory=False),
        mp_policy=MixedPrecisionPolicy(BF16, F32),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(2):
        for microbatch in range(2):
            model.set_requires_gradient_sync(microbatch == 1)
            loss = loss_of(model, run, 2 * index + microbatch).float()
            loss.backward()
            run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=index % 2 == 0)


# --- ignored parameters


class Gated(nn.Module):
    """A layer whose gate is left to the user."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(models.DIM, models.DIM)
        self.gate = nn.Parameter(torch.ones(models.DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x)) * self.gate


IGNORED: dict[str, Callable[[Any], set[nn.Parameter]]] = {
    "some of a unit": lambda model: {block.gate for block in model[1:]},
    "a whole unit": lambda model: set(model[1].parameters()),
    "the root's": lambda model: set(model[0].parameters()),
}


@pytest.mark.parametrize("which", IGNORED)
@training_test()
def test_ignored_parameters_stay_plain(run: TrainingRun, which: str) -> None:
    model = nn.Sequential(nn.Embedding(models.VOCAB, models.DIM), Gated(), Gated())
    run.shard(model, units=[Gated], ignored_params=IGNORED[which](model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)  # plain tensors and DTensors
    for index in range(3):
        run.note_registration(f"step {index}", model)
        with run.counted(f"step {index}") if index else nullcontext():
            loss = loss_of(model, run, index)
            loss.backward()
        run.observe(loss, model)  # ignored ones: each rank's own gradient
        optimizer.step()
        optimizer.zero_grad()


@training_test(tolerance=BITWISE)
def test_ignored_parameters_are_not_cast(run: TrainingRun) -> None:
    model = nn.Sequential(nn.Embedding(models.VOCAB, models.DIM), Gated(), Gated())
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)
    run.shard(model, units=[Gated], ignored_params=IGNORED["some of a unit"](model), mp_policy=policy)
    for index in range(2):
        loss = loss_of(model, run, index).float()
        loss.backward()
        run.observe(loss, model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        model.zero_grad()


@pytest.mark.row("S10")
@training_test(backends=("inductor",), tolerance=INDUCTOR)
def test_offload_and_ignored_parameters_with_inductor(run: TrainingRun) -> None:
    model = nn.Sequential(nn.Embedding(models.VOCAB, models.DIM), Gated(), Gated())
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    run.shard(model, units=[Gated], ignored_params=IGNORED["some of a unit"](model), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    run.train(model, optimizer, loss_of, steps=2)
