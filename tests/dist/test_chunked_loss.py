"""Units of several modules of which a forward runs some: the head is called by itself, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import models
import pytest
import torch
from test_entry_points import SUMMED, needs_reset
from test_training import BITWISE
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from graphshard.testing import TrainingRun, training_test

pytestmark = needs_reset  # calls of a part of a unit came with it

BF16, F32 = torch.bfloat16, torch.float32
CHUNKS = 3


class Chunked(models.Decoder):
    def __init__(self, tied: bool = False, checkpointed: bool = False) -> None:
        super().__init__(layers=2, tied=tied)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor, skip_head: bool = False) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False) if self.checkpointed else layer(h)
        h = self.norm(h)
        return h if skip_head else self.head(h)


def sharded(
    run: TrainingRun,
    *,
    grouped: bool = True,
    tied: bool = False,
    checkpointed: bool = False,
    reshard: bool = True,
    inner: MixedPrecisionPolicy | None = None,
    outer: MixedPrecisionPolicy | None = None,
    **options: Any,
) -> Chunked:
    """The unit is [norm, head], [embed, norm, head] where they are tied, or each has its own."""

    def annotate(model: nn.Module, mesh: DeviceMesh) -> None:
        assert isinstance(model, Chunked)
        rest: dict[str, Any] = {"mesh": mesh, "mp_policy": outer or MixedPrecisionPolicy()}
        last: dict[str, Any] = {**rest, "mp_policy": inner or rest["mp_policy"], "reshard_after_forward": reshard}
        if grouped:
            fully_shard([*([model.embed] if tied else []), model.norm, model.head], **last)
        else:
            fully_shard(model.norm, **last)
            fully_shard(model.head, **last)
        for layer in model.layers:
            fully_shard(layer, reshard_after_forward=reshard, **rest)
        fully_shard(model, **rest)

    return run.shard(Chunked(tied, checkpointed), annotate=annotate, **options)


def chunked_step(run: TrainingRun, model: Chunked, index: int) -> Tensor:
    """Forward without the head, forward and backward of the head on each chunk, backward of the rest."""
    (x,) = models.tokens(index, run.rank)
    h = model(x, skip_head=True)
    losses, gradients, seen = [], [], []
    for chunk, target in zip(h.detach().chunk(CHUNKS, dim=1), x.chunk(CHUNKS, dim=1), strict=True):
        leaf = chunk.clone().requires_grad_()
        logits = model.head(leaf)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), target.flatten()) / CHUNKS
        loss.backward()
        losses.append(loss.detach())
        gradients.append(leaf.grad)
        weight_gradient = model.head.weight.grad
        seen.append({"hidden": str(h.dtype), "logits": str(logits.dtype), "head": copy_of(weight_gradient)})
    h.backward(torch.cat(gradients, dim=1))
    run.note(f"step {index}", seen)
    return torch.stack(losses).sum()


def copy_of(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().clone()


def train(run: TrainingRun, model: Chunked, steps: int = 3) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for index in range(steps):
        with run.counted(f"step {index}") if index else nullcontext():
            loss = chunked_step(run, model, index)
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


HALF = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32, output_dtype=BF16)
CASES: dict[str, dict[str, Any]] = {
    "not grouped": {"grouped": False},
    "tied, kept gathered": {"tied": True, "reshard": False},
    "half in the unit alone": {"inner": HALF, "outer": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)},
    "checkpointed": {"checkpointed": True},
    "half, tied, checkpointed": {"outer": HALF, "tied": True, "checkpointed": True},
}


@pytest.mark.row("S17")
@pytest.mark.parametrize("case", [case for case in CASES if models.ROUNDS_GRADIENTS or "half" not in case])
@training_test(tolerance=BITWISE)
def test_each_chunk_of_the_head_reduces_its_gradient(run: TrainingRun, case: str) -> None:
    train(run, sharded(run, **CASES[case]))


@pytest.mark.row("S17")
@training_test(tolerance=BITWISE)
def test_grouping_the_norm_with_the_head_changes_no_bit(run: TrainingRun) -> None:
    for grouped in (True, False):
        torch.manual_seed(1)
        model = sharded(run, grouped=grouped)
        for microbatch in range(2):
            run.observe(chunked_step(run, model, microbatch), model)
    for seen, alone in zip(run.observations[:2], run.observations[2:], strict=True):
        assert torch.equal(seen.loss, alone.loss)
        for name, gradient in seen.gradients.items():
            other: Any = alone.gradients[name]
            assert gradient is other or torch.equal(gradient.to_local(), other.to_local()), name


@pytest.mark.row("S17")
@training_test(tolerance=BITWISE)
def test_whole_forwards_between_chunked_steps(run: TrainingRun) -> None:
    model = sharded(run)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for index in range(4):
        if index % 2:
            loss = chunked_step(run, model, index)
        else:
            (x,) = models.tokens(index, run.rank)
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
            loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


class Pair(nn.Module):
    """Two modules of one unit, with computation in fp32 between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCAB, models.DIM)
        self.a, self.b = (nn.Linear(models.DIM, models.DIM) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        between: Tensor = self.a(self.embed(x)).float() * 1.5
        out: Tensor = self.b(between)
        return out


def pair_of_half(model: nn.Module, mesh: DeviceMesh) -> None:
    assert isinstance(model, Pair)
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32, cast_forward_inputs=True)
    fully_shard([model.a, model.b], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


@pytest.mark.row("S18")
@training_test(tolerance=BITWISE)
def test_inputs_of_each_module_of_a_unit_are_cast(run: TrainingRun) -> None:
    model = run.shard(Pair(), annotate=pair_of_half)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for index in range(3):
        output = model(*models.tokens(index, run.rank))
        assert output.dtype == BF16
        loss = output.float().square().mean()
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        run.observe(loss, model, outputs=output)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.row("S19")
@pytest.mark.parametrize(("grouped", "reshard"), [(True, True), (True, False), (False, True)])
@training_test(tolerance=BITWISE)
def test_chunks_accumulate_over_microbatches(run: TrainingRun, grouped: bool, reshard: bool) -> None:
    model = sharded(run, grouped=grouped, reshard=reshard)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for index in range(2):
        for microbatch in range(3):
            last = microbatch == 2
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            with run.counted(f"step {index}.{microbatch}") if index else nullcontext():
                loss = chunked_step(run, model, 3 * index + microbatch)
            run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def kept_gathered(head: Any) -> Iterator[None]:
    head.set_reshard_after_forward(False)
    head.set_reshard_after_backward(False)
    yield
    head.set_reshard_after_forward(True)
    head.set_reshard_after_backward(True)
    head.reshard()


@pytest.mark.row("S20")
@pytest.mark.parametrize(("grouped", "tied"), [(False, False), (True, True)])
@training_test(tolerance=BITWISE)
def test_head_stays_gathered_over_its_chunks(run: TrainingRun, grouped: bool, tied: bool) -> None:
    model = sharded(run, grouped=grouped, tied=tied)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for index in range(4):
        (x,) = models.tokens(index, run.rank)
        h = model(x, skip_head=True)
        gradients, losses = [], []
        with run.counted(f"chunks of step {index}") if index else nullcontext(), kept_gathered(model.head):
            for i, (chunk, target) in enumerate(
                zip(h.detach().chunk(CHUNKS, dim=1), x.chunk(CHUNKS, dim=1), strict=True)
            ):
                leaf = chunk.clone().requires_grad_()
                loss = nn.functional.cross_entropy(model.head(leaf).flatten(0, 1), target.flatten())
                loss.backward()
                losses.append(loss.detach())
                gradients.append(leaf.grad)
                run.note_registration(f"step {index}, after chunk {i}", model.head)
        run.note_registration(f"step {index}, resharded", model.head)
        h.backward(torch.cat(gradients, dim=1))
        run.observe(torch.stack(losses).sum(), model)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.row("S23")
@pytest.mark.parametrize("grouped", [True, False])
@training_test(tolerance=SUMMED)
def test_two_forwards_without_the_head_leave_it_without_gradient(run: TrainingRun, grouped: bool) -> None:
    model = sharded(run, grouped=grouped)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(3):
        with run.counted(f"step {index}") if index else nullcontext():
            first, second = (model(*models.tokens(2 * index + i, run.rank), skip_head=True) for i in range(2))
            loss = (first * second).pow(3).mean()
            loss.backward()
        assert model.head.weight.grad is None
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()
