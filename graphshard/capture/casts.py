"""What FSDP2's forward hooks cast: a unit's inputs to param_dtype, its output to output_dtype, as hooks that can be
traced.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

Hook = Callable[..., Any]


@cache  # equal policies share their hooks, so that equal blocks share compiled code
def cast_hooks(policy: MixedPrecisionPolicy) -> tuple[Hook, Hook]:
    """The (pre-forward, post-forward) hooks for a unit's policy. One that casts nothing changes nothing."""
    param_dtype = policy.param_dtype if policy.cast_forward_inputs else None
    output_dtype = policy.output_dtype

    def pre(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if param_dtype is not None:
            return cast_floating(args, param_dtype), cast_floating(kwargs, param_dtype)
        return None

    def post(module: nn.Module, args: Any, output: Any) -> Any:
        return None if output_dtype is None else cast_floating(output, output_dtype)

    return pre, post


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """`value` with each floating-point tensor in `dtype`, in the containers in which FSDP2 finds them."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: cast_floating(getattr(value, field.name), dtype) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **changed)
    if isinstance(value, OrderedDict):  # also a subclass, such as a model's own output type
        copy = type(value)()
        for key, item in value.items():
            copy[key] = cast_floating(item, dtype)
        return copy
    if isinstance(value, dict):
        return {key: cast_floating(item, dtype) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_floating(item, dtype) for item in value))
    if isinstance(value, (tuple, list, set)):
        return type(value)([cast_floating(item, dtype) for item in value])
    return value
