"""What is private of torch about process groups and works."""

from __future__ import annotations

import functools
import sys

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


def timeout_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds after which the collectives of a group fail, of tensors on a device; torch's default where it is not
    told.
    """
    try:
        options = group._get_backend(device).options
        return float(options._timeout.total_seconds())
    except (RuntimeError, AttributeError):  # a group of someone's own
        return default_pg_timeout.total_seconds()


def resolve_process_group(name: str) -> dist.ProcessGroup:
    """The process group called `name`."""
    group: dist.ProcessGroup = _resolve_process_group(name)  # type: ignore[arg-type]
    return group


def register_work(tensor: torch.Tensor, work: dist.Work) -> None:
    """Lets `wait_tensor(tensor)` wait for what makes it."""
    torch._C._distributed_c10d._register_work(tensor, work)


def takes_several_tensors(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether what runs the collectives of `group` on a device has one that takes several tensors at once."""
    if type(group) is dist.ProcessGroup:
        return bool(group._get_backend(torch.device(device_type)).supports_coalescing)
    return bool(getattr(group, "supports_coalescing", False))  # of someone's own


def forget_meshes() -> None:
    """Empties DTensor's caches of layouts, which keep meshes, and with them the threads of destroyed groups."""
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    clear_redistribute_planner_cache()
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.tensor"):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()
