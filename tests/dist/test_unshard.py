"""`unshard`, its handle, `reshard` and `reset_iter_state`: what is registered, and who gathers."""

from __future__ import annotations

from contextlib import nullcontext

import models
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, UnshardHandle, fully_shard

import graphshard
from graphshard.testing import Bitwise, TrainingRun, WorkerPool, training_test

BITWISE = Bitwise(equal_zeros="a sum with a zero term loses the sign of zero")
UNITS = 4


def loss_of(model: nn.Module, run: TrainingRun, index: int) -> Tensor:
    loss: Tensor = model(*models.features(index, run.rank)).float().square().mean()
    return loss


def units_of(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def check_counts(run: TrainingRun, *, all_gather: int, reduce_scatter: int = UNITS) -> None:
    """Eager FSDP2 launches exactly these, a compiled model at most as many all-gathers."""
    label, seen = run.counts[-1]
    assert seen["reduce_scatter"] == reduce_scatter, label
    assert seen["all_gather"] == all_gather if run.is_reference else seen["all_gather"] <= all_gather, label


@pytest.mark.row("S31", "P4")
@pytest.mark.parametrize(
    "async_op",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                torch.__version__ >= "2.15",
                reason="FSDP2 of torch 2.15 leaves such a unit unsharded after its backward",
            ),
        ),
    ],
)
@training_test(tolerance=BITWISE)
def test_unshard_registers_whole_parameters_and_forward_uses_them(run: TrainingRun, async_op: bool) -> None:
    model = run.shard(models.mlps(), units=[models.Mlp])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(3):
        with run.counted(f"unshard {index}"):
            handles = [unit.unshard(async_op=async_op) for unit in units_of(model)[:2]]
            run.note_registration(f"step {index}, launched", model)
            for handle in handles:
                assert isinstance(handle, UnshardHandle) if async_op else handle is None
                if handle is not None:
                    handle.wait()
                    handle.wait()  # a second wait does nothing
        run.note_registration(f"step {index}, arrived", model)
        check_counts(run, all_gather=2, reduce_scatter=0)
        with run.counted(f"step {index}") if index else nullcontext():
            loss = loss_of(model, run, index)
            run.note_registration(f"step {index}, after forward", model)
            loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()
        if index:
            check_counts(run, all_gather=2 * UNITS - 1 - 2)


@pytest.mark.row("S31")
@training_test(tolerance=BITWISE)
def test_forward_waits_for_what_unshard_launched(run: TrainingRun) -> None:
    model = run.shard(models.mlps(), units=[models.Mlp])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(3):
        with run.counted(f"step {index}") if index else nullcontext():
            for unit in units_of(model):
                unit.unshard(async_op=True)
            loss = loss_of(model, run, index)
            loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()
        if index:
            check_counts(run, all_gather=2 * UNITS - 1)


@pytest.mark.row("S3", "P4")
@pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(param_dtype=torch.bfloat16)], ids=["f32", "bf16"])
@training_test(tolerance=BITWISE)
def test_reshard_frees_what_unshard_gathered(run: TrainingRun, policy: MixedPrecisionPolicy | None) -> None:
    model = run.shard(models.mlps(), units=[models.Mlp], **({"mp_policy": policy} if policy else {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(3):
        for unit in units_of(model):
            unit.unshard()
        run.note_registration(f"step {index}, unsharded", model)
        run.note(f"dtypes {index}", [str(p.dtype) for p in model.parameters()])
        for unit in units_of(model)[1:]:
            unit.reshard()
            unit.reshard()  # a second one does nothing
        run.note_registration(f"step {index}, resharded", model)
        with run.counted(f"step {index}") if index else nullcontext():
            loss = loss_of(model, run, index)
            loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()
        if index:
            check_counts(run, all_gather=2 * (UNITS - 1))


@pytest.mark.row("S31", "P4")
@training_test(tolerance=BITWISE)
def test_parameters_are_unsharded_between_forward_and_backward(run: TrainingRun) -> None:
    model = run.shard(models.mlps(), units=[models.Mlp])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(3):
        with run.counted(f"step {index}") if index else nullcontext():
            loss = loss_of(model, run, index)
            model[2].unshard()
            run.note_registration(f"step {index}, before backward", model)
            loss.backward()
        run.note_registration(f"step {index}, after backward", model)
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()
        if index:
            check_counts(run, all_gather=2 * UNITS - 1)


def shard_each(model: nn.Module, mesh: DeviceMesh) -> None:
    for module in [*list(model.children())[1:], model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=False)


@pytest.mark.row("P4")
@training_test(tolerance=BITWISE)
def test_forwards_between_unshard_and_reshard_gather_nothing(run: TrainingRun) -> None:
    """A pipeline's order: unshard, forwards, reshard; then the backwards gather for themselves."""
    model = run.shard(models.mlps(), annotate=shard_each)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(2):
        for unit in units_of(model):
            unit.unshard()
        with run.counted(f"step {index}, forwards"):
            losses = [loss_of(model, run, 3 * index + i) for i in range(2)]
        check_counts(run, all_gather=0, reduce_scatter=0)
        run.note_registration(f"step {index}, after forwards", model)
        for unit in units_of(model):
            unit.reshard()
        run.note_registration(f"step {index}, resharded", model)
        for microbatch, loss in enumerate(losses):
            model.set_requires_gradient_sync(microbatch == 1)
            loss.backward()
            run.note(f"loss {index}, {microbatch}", loss)
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="this torch has no reset_iter_state")
@pytest.mark.row("S21")
@training_test(tolerance=BITWISE)
def test_reset_forgets_an_abandoned_forward(run: TrainingRun) -> None:
    model = run.shard(models.mlps(), units=[models.Mlp])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(3):
        loss_of(model, run, 100 + index)
        model.reset_iter_state()
        run.note_registration(f"step {index}, reset", model)
        with run.counted(f"step {index}") if index else nullcontext():
            loss = loss_of(model, run, index)
            loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()
        if index:
            check_counts(run, all_gather=2 * UNITS - 1)
    with pytest.raises(RuntimeError, match="must be called on the root"):
        model[1].reset_iter_state()


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="this torch has no reset_iter_state")
@pytest.mark.row("S21")
@training_test(world_size=4, mesh_shape=(2, 2), mesh_axes=("dp_replicate", "dp_shard"), tolerance=BITWISE)
def test_reset_forgets_scattered_gradients_that_were_not_all_reduced(run: TrainingRun) -> None:
    model = run.shard(models.mlps(), units=[models.Mlp])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(2):
        model.set_requires_all_reduce(False)
        loss_of(model, run, 2 * index).backward()
        model.reset_iter_state()
        model.set_requires_all_reduce(True)
        loss = loss_of(model, run, 2 * index + 1)
        loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


def programs_of_a_model_that_is_frozen_again_and_again() -> list[int]:
    model = graphshard.compile(models.mlps(), init_device_mesh("cpu", (2,)), backend="aot_eager")
    counts = []
    for step in range(6):
        model[1].up.bias.requires_grad_(step % 2 == 0)
        model.unshard()
        model.reshard()
        counts.append(len(graphshard.report(model).programs))
    return counts


def test_programs_of_units_are_lowered_once_for_parameters_that_change(two_ranks: WorkerPool) -> None:
    assert two_ranks.run(programs_of_a_model_that_is_frozen_again_and_again) == [[1] * 6] * 2
