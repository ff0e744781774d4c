"""What FSDP2's forward hooks do with a unit's inputs and output, as hooks that can be traced: they cast inputs to
param_dtype and the output to output_dtype, and tell apart what the unit adds to gradients.
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

from graphshard.capture.parameters_in_forward import FORWARD
from graphshard.capture.unit_inputs import entering
from graphshard.compat.dynamo import inline_only, put_back_later

Hook = Callable[..., Any]


@cache  # equal policies share their hooks, so that equal blocks share compiled code
def unit_hooks(policy: MixedPrecisionPolicy, enters: bool = True) -> tuple[Hook, Hook]:
    """The (pre-forward, post-forward) hooks for a unit's policy.

    Args:
        policy: of the unit.
        enters: whether activations enter the unit by this call. Not by one of several modules (in FSDP2 they enter by
            the one that is called first), nor by a method, nor where the unit has no parameters.
    """
    param_dtype = policy.param_dtype if policy.cast_forward_inputs else None
    output_dtype = policy.output_dtype

    @inline_only
    def pre(module: nn.Module, args: Any, kwargs: Any) -> Any:
        put_back_later(_set_runs, module, True)
        if param_dtype is not None:
            args, kwargs = cast_floating(args, param_dtype), cast_floating(kwargs, param_dtype)
        if enters and torch.is_grad_enabled():
            return entering(args, kwargs)
        return None if param_dtype is None else (args, kwargs)

    @inline_only
    def post(module: nn.Module, args: Any, output: Any) -> Any:
        put_back_later(_set_runs, module, False)
        return None if output_dtype is None else cast_floating(output, output_dtype)

    return pre, post


@inline_only
def _set_runs(module: nn.Module, runs: bool) -> None:
    forward = module.__dict__[FORWARD]
    forward.runs = forward.model if runs else ""


@inline_only
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
