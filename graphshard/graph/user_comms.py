"""Operators for communication that users supply: `set_custom_all_gather`, `set_custom_reduce_scatter`,
`set_all_reduce_hook`.

What a user supplies is Python, so a program calls it through an operator, by the key of its unit: keys are equal on all
ranks and programs hold no Python objects. What a user wrote is called to be done; what torch has, with other memory
(`set_allocate_memory_from_process_group_for_comm`, `set_symm_mem_for_comm`), is awaited where any other collective is.
All else of the bucket is compiled.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from graphshard.errors import ModelDeleted


class UserComms(Protocol):
    """What a unit's users may have supplied."""

    def all_gather(self, flat: Tensor, world_size: int) -> Tensor:
        """`[n]` of this rank -> `[W * n]`."""

    def reduce_scatter(self, flat: Tensor, op: str) -> Tensor:
        """`[W * n]` -> `[n]` of this rank. `op`: ``"avg"`` or ``"sum"``."""

    def hook_all_reduce(self, reduced: Tensor) -> None:
        """The all-reduce hook: changes the reduced bucket `[n]` in place."""


_units: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def register(key: str, unit: UserComms) -> None:
    """Lets programs call what the users of `unit` supplied, by `key`."""
    _units[key] = unit


def _unit(key: str) -> UserComms:
    unit: UserComms | None = _units.get(key)
    if unit is None:
        raise ModelDeleted(key)
    return unit


_LIBRARY: Any = torch.library.Library("graphshard", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("custom_all_gather(Tensor flat, int world_size, str key) -> Tensor")
_LIBRARY.define("custom_reduce_scatter(Tensor flat, str op, int world_size, str key) -> Tensor")
_LIBRARY.define("all_reduce_hook(Tensor reduced, str key) -> Tensor")

CUSTOM_ALL_GATHER = torch.ops.graphshard.custom_all_gather.default
CUSTOM_REDUCE_SCATTER = torch.ops.graphshard.custom_reduce_scatter.default
ALL_REDUCE_HOOK = torch.ops.graphshard.all_reduce_hook.default


def _all_gather(flat: Tensor, world_size: int, key: str) -> Tensor:
    return _unit(key).all_gather(flat, world_size)


def _reduce_scatter(flat: Tensor, op: str, world_size: int, key: str) -> Tensor:
    return _unit(key).reduce_scatter(flat, op)


def _hook(reduced: Tensor, key: str) -> Tensor:
    result = reduced.clone()  # an operator must not write its input
    _unit(key).hook_all_reduce(result)
    return result


for _name, _implementation in (
    ("custom_all_gather", _all_gather),
    ("custom_reduce_scatter", _reduce_scatter),
    ("all_reduce_hook", _hook),
):
    _LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")


def _all_gather_fake(flat: Tensor, world_size: int, key: str) -> Tensor:
    return flat.new_empty(flat.numel() * world_size)


def _reduce_scatter_fake(flat: Tensor, op: str, world_size: int, key: str) -> Tensor:
    return flat.new_empty(flat.numel() // world_size)


def _hook_fake(reduced: Tensor, key: str) -> Tensor:
    return torch.empty_like(reduced)


torch.library.register_fake("graphshard::custom_all_gather", _all_gather_fake, lib=_LIBRARY)
torch.library.register_fake("graphshard::custom_reduce_scatter", _reduce_scatter_fake, lib=_LIBRARY)
torch.library.register_fake("graphshard::all_reduce_hook", _hook_fake, lib=_LIBRARY)
