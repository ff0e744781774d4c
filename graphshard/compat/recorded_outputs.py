"""Hooks that transformers registers in the first forward that is asked for more than its usual outputs, such as the
routers' logits of a mixture of experts, or the hidden states of a vision tower: behind a lock, which breaks the graph
of that forward, and of no later one.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch import nn

_LIBRARY, _REGISTER, _RECORDABLE = (
    "transformers.utils.output_capturing",
    "maybe_install_capturing_hooks",
    "_can_record_outputs",
)
# What wraps methods that ask modules which they call for some of their hidden states.
_SELECTS = "select_hidden_states"


def register_recorders(model: nn.Module) -> None:
    """Registers them before that forward, in modules whose forward would, as their ``config`` asks for such outputs, or
    a method of what they are in does.
    """
    register = getattr(sys.modules.get(_LIBRARY), _REGISTER, None)
    if register is None:
        return
    asked = {inner for module in model.modules() for child in _asked_for_states(module) for inner in child.modules()}
    for module in model.modules():
        config = getattr(module, "config", None)
        keys = getattr(module, _RECORDABLE, None) or ()
        asks = any(getattr(config, f"output_{key}", False) for key in keys) or (module in asked and bool(keys))
        # Not modules around these, which have the attribute, too: what is inside would get its hooks once more.
        if asks and any(_is_of_library(function) for function in _wrapped(module.forward)):
            register(module)


def _asked_for_states(module: nn.Module) -> Iterator[nn.Module]:
    """Children that a method which asks for hidden states reads."""
    for cls in type(module).__mro__:
        for method in vars(cls).values():
            wrappers = _wrapped(method) if isinstance(method, FunctionType) else ()
            if any(_is_of_library(wrapper) and _SELECTS in wrapper.__code__.co_qualname for wrapper in wrappers):
                names = inspect.unwrap(method).__code__.co_names
                yield from (child for name, child in module.named_children() if name in names)


def _is_of_library(function: Any) -> bool:
    return bool(getattr(function, "__globals__", {}).get("__name__", "") == _LIBRARY)


def _wrapped(function: Any) -> Iterator[Any]:
    """A function, and what it wraps."""
    while function is not None:
        function = getattr(function, "__func__", function)
        yield function
        function = getattr(function, "__wrapped__", None)
