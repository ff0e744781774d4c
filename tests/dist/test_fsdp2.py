"""The adapter to FSDP2's state: what it reads is true, and what it takes off it puts back."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from graphshard import fsdp2
from graphshard.capture.marked_classes import forward_method
from graphshard.capture.unit_hooks import unit_hooks
from graphshard.reporting.report import Report
from graphshard.state.parameter_watch import ParameterWatch
from graphshard.state.shards import Shard
from graphshard.testing import WorkerPool


def sharded(model: nn.Module, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in getattr(model, "layers", ()):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def flat_shards() -> list[int]:
    model = sharded(models.Uneven())
    fsdp2.lazy_init(model)
    (unit,) = fsdp2.sharded_units(model)
    for param in unit.params:
        local = param.parameter.to_local()  # type: ignore[attr-defined]
        assert param.flat_shard.dim() == 1
        if local.numel():
            assert param.flat_shard.data_ptr() == local.data_ptr()
    assert all(param.size == tuple(param.parameter.shape) for param in unit.params)
    return [param.flat_shard.numel() for param in unit.params]


def test_flat_shards_have_one_size_on_all_ranks(four_ranks: WorkerPool) -> None:
    first, *others = four_ranks.run(flat_shards)
    assert others == [first] * 3


def names_and_owners() -> None:
    model = sharded(models.Decoder(layers=2, tied=True))
    units = fsdp2.sharded_units(model)
    assert [unit.name for unit in units] == ["", "layers.0", "layers.1"]
    tied = units[0].params[0]
    assert tied.owners == [(model.embed, "weight"), (model.head, "weight")]
    params = [param for unit in units for param in unit.params]
    names = fsdp2.parameter_names(model, params)
    assert names[0] == "embed.weight"
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    model.unshard()
    assert names == fsdp2.parameter_names(model, params)
    model.reshard()
    assert [unit.reshard_after_forward for unit in units] == [True, True, True]
    fsdp2.lazy_init(model)
    assert [unit.reshard_after_forward for unit in units] == [False, True, True]  # the root's is kept by default
    assert [unit.world_size for unit in units] == [2, 2, 2] and all(unit.reduce_grads for unit in units)
    model.layers[0].set_requires_gradient_sync(False)
    assert [unit.reduce_grads for unit in units] == [True, False, True]
    assert all(unit.is_sharded for unit in units)
    model.unshard()
    assert not units[0].is_sharded
    units[0].reshard()
    assert units[0].is_sharded


def test_units_names_and_flags(two_ranks: WorkerPool) -> None:
    two_ranks.run(names_and_owners)


def delivered_gradients() -> None:
    model = sharded(models.Uneven())
    fsdp2.lazy_init(model)
    (unit,) = fsdp2.sharded_units(model)
    rank = torch.distributed.get_rank()
    hooked: list[Any] = []
    for param in unit.params:
        param.parameter.register_post_accumulate_grad_hook(hooked.append)
        for times in (1, 2):
            param.deliver_grad(torch.full_like(param.flat_shard, 1.0 + rank))
            grad = param.parameter.grad
            assert isinstance(grad, DTensor) and grad.shape == param.parameter.shape
            assert torch.equal(grad.to_local(), torch.full_like(grad.to_local(), times * (1.0 + rank)))
    assert len(hooked) == 2 * len(unit.params) and hooked[0] is unit.params[0].parameter


def test_gradients_are_unpadded_added_and_announced(two_ranks: WorkerPool) -> None:
    two_ranks.run(delivered_gradients)


def hooks_come_back() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    order: list[str] = []
    for options in ({}, {"mp_policy": policy}):
        order.clear()
        model = models.Decoder(layers=2)
        model.register_forward_pre_hook(lambda *_: order.append("before"))
        model.register_forward_hook(lambda *_: order.append("first"))
        sharded(model, **options)
        model.register_forward_hook(lambda *_: order.append("last"))
        keys = [list(model._forward_pre_hooks), list(model._forward_hooks)]
        functions = [list(model._forward_pre_hooks.values()), list(model._forward_hooks.values())]
        hooks = fsdp2.ForwardHooks(model, unit_hooks, forward_method)
        for _ in range(2):
            hooks.detach()
            hooks.detach()
            assert keys == [list(model._forward_pre_hooks), list(model._forward_hooks)]
            assert functions != [list(model._forward_pre_hooks.values()), list(model._forward_hooks.values())]
            hooks.attach()
            hooks.attach()
        assert keys == [list(model._forward_pre_hooks), list(model._forward_hooks)]
        assert functions == [list(model._forward_pre_hooks.values()), list(model._forward_hooks.values())]
        model(*models.tokens(0, 0))
        assert order == ["before", "first", "last"]


def test_forward_hooks_come_back_to_their_places(two_ranks: WorkerPool) -> None:
    two_ranks.run(hooks_come_back)


def watched() -> None:
    model = sharded(models.Decoder(layers=2))
    fsdp2.lazy_init(model)
    shards = [Shard(p, unit, "weight", 0, Report()) for unit in fsdp2.sharded_units(model) for p in unit.params]

    def changed() -> bool:
        return watch.changed()

    watch = ParameterWatch(shards)
    assert not changed()
    with torch.no_grad():
        model.head.weight.mul_(2)
    model.unshard()
    model.reshard()
    assert not changed()
    model.head.weight.requires_grad_(False)
    assert changed()
    watch = ParameterWatch(shards)
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    assert not changed()
    model.load_state_dict(state, assign=True)
    assert changed()
    watch = ParameterWatch(shards)
    model.to(torch.float64)
    assert changed()
    watch = ParameterWatch(shards)
    model.head.weight = nn.Parameter(torch.zeros(2))
    with pytest.raises(RuntimeError, match="weight' was replaced after compile"):
        changed()


def test_changed_parameters_are_noticed(two_ranks: WorkerPool) -> None:
    two_ranks.run(watched)


def unreduced() -> None:
    model = sharded(models.Decoder(layers=2))
    params = [param for unit in fsdp2.sharded_units(model) for param in unit.params]

    def step(sync: bool) -> list[Tensor]:
        model.set_requires_gradient_sync(sync)
        model(*models.tokens(0, 0)).square().mean().backward()
        grads = [param.parameter.grad for param in params]
        return [grad.full_tensor() for grad in grads if isinstance(grad, DTensor)]

    want = step(sync=True)
    model.zero_grad()
    assert not any(param.take_unreduced() is not None for param in params)
    assert not step(sync=False)
    held = [param.take_unreduced() for param in params]
    assert not any(param.take_unreduced() is not None for param in params)
    for param, grad in zip(params, held, strict=True):
        assert grad is not None and grad.shape == param.size
        param.give_unreduced(grad)
    for got, once in zip(step(sync=True), want, strict=True):
        assert torch.equal(got, 2 * once)


def test_unreduced_gradients_of_the_other_engine_are_taken_and_given(two_ranks: WorkerPool) -> None:
    two_ranks.run(unreduced)
