"""Hooks that transformers registers in the first forward that is asked for more than its usual outputs, such as the
routers' logits of a mixture of experts: behind a lock, which breaks the graph of that forward, and of no later one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn

_LIBRARY, _REGISTER, _RECORDABLE = (
    "transformers.utils.output_capturing",
    "maybe_install_capturing_hooks",
    "_can_record_outputs",
)


def register_recorders(model: nn.Module) -> None:
    """Registers them before that forward, in modules whose forward would, as their ``config`` asks for such outputs."""
    register = getattr(sys.modules.get(_LIBRARY), _REGISTER, None)
    if register is None:
        return
    for module in model.modules():
        config = getattr(module, "config", None)
        asks = any(getattr(config, f"output_{name}", False) for name in getattr(module, _RECORDABLE, None) or ())
        # Not modules around these, which have the attribute, too: what is inside would get its hooks once more.
        if asks and _LIBRARY in _wrappers(module.forward):
            register(module)


def _wrappers(function: object) -> Iterator[str]:
    """Names of the Python modules that have written a function, and what it wraps."""
    while function is not None:
        function = getattr(function, "__func__", function)
        yield getattr(function, "__globals__", {}).get("__name__", "")
        function = getattr(function, "__wrapped__", None)
