"""Gathered parameters and unreduced gradients that are there at once: no more units than under eager FSDP2.

Counted from the lowered graphs, and seen in programs that run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import models
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from graphshard.capture.marked_classes import ENGINE
from graphshard.testing import WorkerPool
from graphshard.testing.memory import ARGUMENTS, MemoryUse, Role, Tracked, watch_memory

LAYERS = 4
WORLD_SIZE = 2
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Step(NamedTuple):
    """Forward and backward of one microbatch.

    Attributes:
        programs: that were lowered: what was counted, and what was seen.
        kept: gathered parameters that stay behind it, by FQN.
        held: unreduced gradients that stay behind it: (address, dtype, bytes) by FQN.
    """

    programs: list[tuple[MemoryUse, MemoryUse]]
    kept: list[str]
    held: dict[str, tuple[int, torch.dtype, int]]

    def counted(self, direction: str) -> MemoryUse:
        return next(counted for counted, _ in self.programs if counted.direction == direction)


class Training(NamedTuple):
    steps: list[Step]
    param_bytes: dict[str, int]  # gathered, in param_dtype, padded, by unit
    grad_bytes: dict[str, int]  # full, in reduce_dtype, by FQN
    all_reduced: bool


def train(reshard: bool | None, syncs: list[bool], mp_policy: MixedPrecisionPolicy | None = None) -> Training:
    torch.manual_seed(0)
    options: dict[str, Any] = {} if mp_policy is None else {"mp_policy": mp_policy}
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    model: Any = models.Decoder(LAYERS)
    graphshard.compile(
        model, mesh, backend="aot_eager", plan="fsdp2", reshard_after_forward=reshard, strict=True, **options
    )
    steps = []
    for index, sync in enumerate(syncs):
        model.set_requires_gradient_sync(sync)
        with watch_memory(grads_only=True) as programs:
            model(*models.tokens(index, torch.distributed.get_rank())).square().mean().backward()
        shards = list(vars(model)[ENGINE].shards)
        held = {
            shard.fqn: (
                shard.held.untyped_storage().data_ptr(),
                shard.held.dtype,
                shard.held.untyped_storage().nbytes(),
            )
            for shard in shards
            if shard.held is not None
        }
        steps.append(Step(programs, [shard.fqn for shard in shards if shard.full is not None], held))
    param_bytes: dict[str, int] = {}
    for shard in shards:
        dtype = shard.param.param_dtype
        param_bytes.setdefault(shard.unit.name, 0)
        param_bytes[shard.unit.name] += shard.leaf.numel() * WORLD_SIZE * dtype.itemsize
    grad_bytes = {shard.fqn: shard.param.parameter.numel() * shard.param.reduce_dtype.itemsize for shard in shards}
    return Training(steps, param_bytes, grad_bytes, all(param.grad is not None for param in model.parameters()))


def check_seen(training: Training) -> None:
    """What was counted is what is allocated.

    Except that gloo copies what it reduces, where other backends read it until the wait, and that the backend holds
    arguments to the end.
    """
    for counted, seen in (program for step in training.steps for program in step.programs):
        assert len(counted.moments) == len(seen.moments)
        for want, got in zip(counted.moments, seen.moments, strict=True):
            for what in {*want.live, *got.live}:
                wanted, there = want.live.get(what, 0), got.live.get(what, 0)
                if what.unit == ARGUMENTS:
                    assert there >= wanted, (counted.direction, want, got)
                elif what.role == "gathered" or want.node.startswith("reduce_scatter"):
                    assert there == wanted, (counted.direction, want, got)
                else:
                    assert there <= wanted, (counted.direction, want, got)


def most_units(use: MemoryUse, role: Role) -> int:
    """Layers, beside the root, of which something is there at once."""
    return max(len(moment.units(role) - {"", ARGUMENTS}) for moment in use.moments)


def check_depth_one(use: MemoryUse, param_bytes: dict[str, int]) -> None:
    """Beside the root's parameters those of two layers, or of one and its buffer while it is copied out."""
    assert most_units(use, "gathered") == 2
    for moment in use.moments:
        assert moment.total("gathered") <= param_bytes[""] + 2 * param_bytes["layers.0"], moment


def test_two_units_are_gathered_at_once(two_ranks: WorkerPool) -> None:
    for training in two_ranks.run(train, True, [True]):
        check_seen(training)
        for direction in ("forward", "backward"):
            check_depth_one(training.steps[0].counted(direction), training.param_bytes)
        assert training.steps[0].kept == []


def test_the_root_stays_between_forward_and_backward(two_ranks: WorkerPool) -> None:
    for training in two_ranks.run(train, None, [True], BF16):
        check_seen(training)
        forward, backward = (training.steps[0].counted(direction) for direction in ("forward", "backward"))
        check_depth_one(forward, training.param_bytes)
        check_depth_one(backward, training.param_bytes)
        assert forward.moments[-1].units("gathered") == {""}
        assert backward.moments[0].units("gathered") == {ARGUMENTS}
        assert training.steps[0].kept == []


def test_all_units_stay_between_forward_and_backward(two_ranks: WorkerPool) -> None:
    for training in two_ranks.run(train, False, [True]):
        check_seen(training)
        forward, backward = (training.steps[0].counted(direction) for direction in ("forward", "backward"))
        everything = sum(training.param_bytes.values())
        assert forward.moments[-1].total("gathered") == everything
        assert forward.peak("gathered").total("gathered") <= everything + training.param_bytes["layers.0"]
        # Not the embedding, which backward does not read; freed as it goes.
        assert backward.peak("gathered") == backward.moments[0]
        assert all(moment.units("gathered") <= {ARGUMENTS} for moment in backward.moments)
        assert backward.moments[-1].total("gathered") == 0
        assert training.steps[0].kept == []


def test_gradients_of_two_units_are_unreduced_at_once(two_ranks: WorkerPool) -> None:
    for training in two_ranks.run(train, True, [True], BF16):
        check_seen(training)
        backward = training.steps[0].counted("backward")
        layer = sum(count for fqn, count in training.grad_bytes.items() if fqn.startswith("layers.0."))
        # The root's come first and last: they wait for the embedding's. A layer's are there as they are computed, in
        # reduce_dtype, and in the buffer that is reduced.
        root = sum(training.grad_bytes.values()) - LAYERS * layer
        assert most_units(backward, "unreduced") == 2
        assert backward.peak("unreduced").total("unreduced") <= 2 * root + 2 * layer + layer // 2
        assert backward.moments[-1].total("unreduced") == 0
        assert training.all_reduced


def test_unreduced_gradients_stay_once_in_reduce_dtype(two_ranks: WorkerPool) -> None:
    for training in two_ranks.run(train, True, [False, False, True], BF16):
        check_seen(training)
        first, second, last = training.steps
        everything = sum(training.grad_bytes.values())
        # All results of the program, in param_dtype; then each is cast and freed.
        assert first.counted("backward").moments[-1].total("unreduced") == everything // 2
        for step in (first, second):
            assert {fqn: count for fqn, (_, _, count) in step.held.items()} == training.grad_bytes
            assert {dtype for _, dtype, _ in step.held.values()} == {torch.float32}
            assert len({address for address, _, _ in step.held.values()}) == len(step.held)
        backward = last.counted("backward")
        assert backward.moments[0].live[Tracked("unreduced", ARGUMENTS)] == everything
        assert backward.moments[-1].total("unreduced") == 0
        assert last.held == {}
        assert training.all_reduced
