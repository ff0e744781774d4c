"""A copy of a model, plain and without data: none of its memory, whatever it was: plain, annotated, compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from graphshard import fsdp2
from graphshard.capture.marked_classes import forward_method, own_class
from graphshard.compat.modules import own_parameters

_FORWARD_METHOD_CODE = forward_method.__code__


def plain_copy(model: nn.Module, tensor_of: Callable[[Tensor], Tensor], whole_of: Callable[[Any], Tensor]) -> nn.Module:
    """A copy whose tensors are others.

    Args:
        model: to copy.
        tensor_of: makes a tensor of the copy of one of the model.
        whole_of: makes one that is gathered of a `ShardedParam`.
    """
    memo: dict[int, Any] = {}
    for unit in fsdp2.sharded_units(model):
        for param in unit.params:
            whole = whole_of(param)
            memo[id(param.parameter)] = whole
            for module, name in param.owners:
                memo[id(own_parameters(module)[name])] = whole
    keys = fsdp2.hook_keys(model)
    shells = []
    for module in model.modules():
        _share(vars(module), tensor_of, memo)
        cls = fsdp2.own_class(own_class(type(module)))
        if cls is not type(module):
            shell = memo[id(module)] = cls.__new__(cls)
            shells.append((module, shell))
    for module, shell in shells:
        shell.__dict__.update(copy.deepcopy(fsdp2.attributes_without(module, keys, _is_ours), memo))
    copied: nn.Module = copy.deepcopy(model, memo)
    return copied


def _share(values: Any, tensor_of: Callable[[Tensor], Tensor], memo: dict[int, Any]) -> None:
    """Notes what stands in a copy for tensors, and for what there is one of."""
    for value in values.values() if isinstance(values, dict) else values:
        if id(value) in memo:
            continue
        if isinstance(value, Tensor):
            memo[id(value)] = tensor_of(value)
        elif isinstance(value, (DeviceMesh, dist.ProcessGroup)):
            memo[id(value)] = value
        elif type(value) in (dict, list, tuple, set) or isinstance(value, dict):
            _share(value, tensor_of, memo)


def _is_ours(name: str, value: object) -> bool:
    code = getattr(getattr(value, "__func__", None), "__code__", None)
    return name.startswith("_graphshard_") or code in _FORWARD_METHOD_CODE.co_consts
