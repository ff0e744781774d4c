"""Setters that are called between steps and microbatches: their effect, their launches, and no second compilation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import graphshard
from graphshard.testing import Bitwise, TrainingRun, training_test

BITWISE = Bitwise(equal_zeros="a sum with a zero term loses the sign of zero")
AXES = ("dp_replicate", "dp_shard")
MLPS = 3
UNITS = MLPS + 1

Change = Callable[[Any], object]


def loss_of(model: nn.Module, run: TrainingRun, index: int) -> Tensor:
    loss: Tensor = model(*models.features(index, run.rank)).square().mean()
    return loss


def check_counts(run: TrainingRun, all_gather: int, reduce_scatter: int, all_reduce: int = 0) -> None:
    """Eager FSDP2 launches exactly these, a compiled model at most as many all-gathers."""
    label, seen = run.counts[-1]
    assert (seen["reduce_scatter"], seen["all_reduce"]) == (reduce_scatter, all_reduce), label
    assert seen["all_gather"] == all_gather if run.is_reference else seen["all_gather"] <= all_gather, label


def nothing(_: Any) -> None:
    """The flags as they are."""


def train(
    run: TrainingRun, model: Any, steps: Sequence[tuple[Sequence[Change], tuple[int, ...]]], *, microbatches: int = 1
) -> None:
    """A first step as it is, then steps before whose microbatches flags change.

    Args:
        run: the pass.
        model: sharded.
        steps: for each, changes of the model before each microbatch, and the step's launches: `check_counts`.
        microbatches: forwards and backwards per step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    regions: list[int] = []
    for index, (changes, launches) in enumerate([((nothing,) * microbatches, ()), *steps]):
        with run.counted(f"step {index}") if launches else nullcontext():
            for microbatch, change in enumerate(changes):
                change(model)
                loss = loss_of(model, run, microbatches * index + microbatch)
                run.note_registration(f"step {index}, {microbatch}, after forward", model)
                loss.backward()
                run.note_registration(f"step {index}, {microbatch}, after backward", model)
                run.note(f"loss {index}, {microbatch}", loss)
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()
        if launches:
            check_counts(run, *launches)
        if not run.is_reference:
            regions.append(graphshard.report(model).regions)
    assert len(set(regions)) <= 1, f"regions grew: {regions}"


def call(name: str, *values: Any, of: Callable[[Any], Any] = lambda model: model, **options: Any) -> Change:
    """A change that calls a setter of the model, or of a part of it."""
    return lambda model: getattr(of(model), name)(*values, **options)


def both(*changes: Change) -> Change:
    return lambda model: [change(model) for change in changes]


SYNC = "set_requires_gradient_sync"
ALL = (2 * UNITS - 1, UNITS)  # launches of a microbatch as it is


@pytest.mark.row("S30")
@training_test(tolerance=BITWISE)
def test_gradient_sync_is_switched_for_all_and_for_one(run: TrainingRun) -> None:
    def middle(model: Any) -> Any:
        return model[2]

    model = run.shard(models.mlps(), units=[models.Mlp])
    gathers = 2 * ALL[0]
    steps: list[tuple[Sequence[Change], tuple[int, ...]]] = [
        ([call(SYNC, False), call(SYNC, True)], (gathers, UNITS)),
        ([call(SYNC, False, of=middle), call(SYNC, True)], (gathers, 2 * UNITS - 1)),
        ([call(SYNC, False, recurse=False), call(SYNC, True, recurse=False)], (gathers, 2 * UNITS - 1)),
        ([both(call(SYNC, False), call(SYNC, True, of=middle)), call(SYNC, True)], (gathers, UNITS + 1)),
        ([nothing, nothing], (gathers, 2 * UNITS)),
    ]
    train(run, model, steps, microbatches=2)


@pytest.mark.row("S30")
@training_test(world_size=4, mesh_shape=(2, 2), mesh_axes=AXES, tolerance=BITWISE)
def test_all_reduce_is_switched_for_all_and_for_one(run: TrainingRun) -> None:
    reduce, gathers = "set_requires_all_reduce", 2 * ALL[0]
    model = run.shard(models.mlps(), units=[models.Mlp])
    steps: list[tuple[Sequence[Change], tuple[int, ...]]] = [
        ([call(reduce, False), call(reduce, True)], (gathers, 2 * UNITS, UNITS)),
        ([call(reduce, False, recurse=False), call(reduce, True)], (gathers, 2 * UNITS, 2 * UNITS - 1)),
        ([call(reduce, False, of=lambda m: m[1]), call(reduce, True)], (gathers, 2 * UNITS, 2 * UNITS - 1)),
        ([call(SYNC, False), call(SYNC, True)], (gathers, UNITS, UNITS)),
    ]
    train(run, model, steps, microbatches=2)


@pytest.mark.row("S30")
@training_test(tolerance=BITWISE)
def test_reshard_after_forward_is_switched_for_all_and_for_one(run: TrainingRun) -> None:
    reshard = "set_reshard_after_forward"
    model = run.shard(models.mlps(), units=[models.Mlp])
    steps: list[tuple[Sequence[Change], tuple[int, ...]]] = [
        ([call(reshard, False)], (UNITS, UNITS)),
        ([call(reshard, True)], (2 * UNITS, UNITS)),  # the root, too
        ([call(reshard, False, recurse=False)], (2 * UNITS - 1, UNITS)),
        ([call(reshard, False, of=lambda m: m[2])], (2 * UNITS - 2, UNITS)),
        ([call(reshard, True, recurse=False)], (2 * UNITS - 1, UNITS)),
    ]
    train(run, model, steps)


@pytest.mark.row("S30")
@training_test(tolerance=BITWISE)
def test_reshard_after_backward_is_switched_for_all_and_for_one(run: TrainingRun) -> None:
    keep = "set_reshard_after_backward"
    model = run.shard(models.mlps(), units=[models.Mlp], reshard_after_forward=False)
    steps: list[tuple[Sequence[Change], tuple[int, ...]]] = [
        ([call(keep, False), call(keep, True)], (UNITS, 2 * UNITS)),
        ([call(keep, False, recurse=False), call(keep, True)], (2 * UNITS - 1, 2 * UNITS)),
        ([call(keep, False, of=lambda m: m[3]), call(keep, True)], (2 * UNITS - 1, 2 * UNITS)),
        ([both(call(keep, False), call(SYNC, False)), both(call(keep, True), call(SYNC, True))], (UNITS, UNITS)),
    ]
    train(run, model, steps, microbatches=2)


@pytest.mark.row("S30", "S31")
@training_test(tolerance=BITWISE)
def test_last_backward_is_announced(run: TrainingRun) -> None:
    last = "set_is_last_backward"
    model = run.shard(models.mlps(), units=[models.Mlp])
    gathers = 2 * ALL[0]
    steps: list[tuple[Sequence[Change], tuple[int, ...]]] = [
        ([call(last, False), call(last, True)], (gathers, 2 * UNITS)),
        ([both(call(last, False), call(SYNC, False)), both(call(last, True), call(SYNC, True))], (gathers, UNITS)),
    ]
    train(run, model, steps, microbatches=2)


def embed_alone(model: nn.Module, mesh: DeviceMesh) -> None:
    assert isinstance(model, models.Decoder)
    for module in [model.embed, *model.layers, model]:
        fully_shard(module, mesh=mesh)


@pytest.mark.row("S16")
@training_test()
def test_unit_that_backward_does_not_read_is_not_gathered(run: TrainingRun) -> None:
    model: Any = run.shard(models.Decoder(layers=2), annotate=embed_alone)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index, gather in enumerate([True, False, True]):
        model.embed.set_unshard_in_backward(gather)
        with run.counted(f"step {index}") if index else nullcontext():
            loss = model(*models.tokens(index, run.rank)).square().mean()
            loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()
        if index:
            check_counts(run, all_gather=6 + gather, reduce_scatter=4)


@pytest.mark.row("S15")
@training_test(tolerance=BITWISE)
def test_event_after_the_optimizers_step_is_accepted(run: TrainingRun) -> None:
    model: Any = run.shard(models.mlps(), units=[models.Mlp])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.register_step_post_hook(lambda *_: model.set_post_optim_event(torch.cpu.current_stream().record_event()))
    run.train(model, optimizer, loss_of)


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
    reason="this torch has no set_reduce_scatter_unused_params",
)
@pytest.mark.row("S30")
@training_test(tolerance=BITWISE)
def test_flags_never_compile_again(run: TrainingRun) -> None:
    """Each flag, both ways, on a model that has run once: neither Dynamo nor graphshard captures anything."""

    def of_each(name: str, *values: Any) -> Change:
        return lambda model: [getattr(module, name)(*values) for module in [model, *list(model)[1:]]]

    changes = [
        call(SYNC, False),
        call(SYNC, True),
        call("set_requires_all_reduce", False),
        call("set_requires_all_reduce", True),
        call("set_reshard_after_forward", False),
        call("set_reshard_after_forward", True),
        call("set_reshard_after_backward", False),
        call("set_reshard_after_backward", True),
        call("set_is_last_backward", False),
        call("set_is_last_backward", True),
        of_each("set_unshard_in_backward", True),
        call("set_reduce_scatter_unused_params", True),
        call("set_reduce_scatter_unused_params", False),
        of_each("set_force_sum_reduction_for_comms", True),
        of_each("set_gradient_divide_factor", 3.0),
        both(of_each("set_force_sum_reduction_for_comms", False), of_each("set_gradient_divide_factor", 2.0)),
        of_each("set_all_reduce_hook", lambda gradient: gradient.mul_(0.5)),
        lambda model: model[1].set_modules_to_forward_prefetch([model[2], model[3]]),
        lambda model: model[3].set_modules_to_backward_prefetch([model[2], model[1]]),
        lambda model: model[1].unshard(),
        lambda model: model[2].unshard(async_op=True),
        lambda model: model.reset_iter_state(),
    ]
    model: Any = run.shard(models.mlps(), units=[models.Mlp])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, run, 0).backward()
    graphs, regions = counters["stats"]["unique_graphs"], None if run.is_reference else graphshard.report(model).regions
    for index, change in enumerate(changes):
        change(model)
        loss = loss_of(model, run, index)
        loss.backward()
        run.note(f"loss {index}", loss)
        if index % 4 == 3:  # no parameter is gathered then
            model.set_requires_gradient_sync(True)
            run.observe(loss, model)
            optimizer.step()
            optimizer.zero_grad()
    assert counters["stats"]["unique_graphs"] == graphs
    assert run.is_reference or graphshard.report(model).regions == regions == 1
