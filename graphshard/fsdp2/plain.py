"""What a module of an annotated model would be without FSDP2: its class, its hooks, its attributes."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import FSDPModule

from graphshard.fsdp2.models import _WRAPPED_METHOD, _states

_OWN_ATTRIBUTES = {str(STATE_KEY), str(REGISTRY_KEY), "_is_fsdp_managed_module", "_fsdp_use_orig_params"}
_FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_STATE_HOOKS = ("_state_dict_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks")


def own_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that a module had before `fully_shard` or `replicate`."""
    return cls.__bases__[-1] if issubclass(cls, FSDPModule) and FSDPModule not in cls.__bases__[-1:] else cls


def hook_keys(model: nn.Module) -> frozenset[int]:
    """Keys of FSDP2's own forward hooks, whatever stands in their places."""
    keys = set[int]()
    for state in _states(model).values():
        for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
            keys.update(single.id for single in getattr(handle, "handles", (handle,)))
    return frozenset(keys)


def attributes_without(
    module: nn.Module, keys: frozenset[int], is_foreign: Callable[[str, Any], bool]
) -> dict[str, Any]:
    """A module's attributes without those of FSDP2; tables of hooks are copies without its hooks.

    Args:
        module: to look at.
        keys: `hook_keys` of its model.
        is_foreign: of a name and a value, whether it is another's, too.
    """
    kept = {}
    for name, value in vars(module).items():
        if str(name) in _OWN_ATTRIBUTES or is_foreign(name, value) or _is_wrapped_method(value):
            continue
        if name in _FORWARD_HOOKS:
            value = type(value)((key, hook) for key, hook in value.items() if key not in keys)
        elif name in _STATE_HOOKS:
            value = type(value)()
        kept[name] = value
    return kept


def _is_wrapped_method(value: object) -> bool:
    code = getattr(value.__func__, "__code__", None) if isinstance(value, MethodType) else None
    return code is _WRAPPED_METHOD
