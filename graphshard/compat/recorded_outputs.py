"""Hooks that transformers registers in the first forward that is asked for more than its usual outputs, such as the
routers' logits of a mixture of experts: behind a lock, which breaks the graph of that forward, and of no later one.
"""

from __future__ import annotations

import sys

from torch import nn

_LIBRARY, _REGISTER, _RECORDABLE = (
    "transformers.utils.output_capturing",
    "maybe_install_capturing_hooks",
    "_can_record_outputs",
)


def register_recorders(model: nn.Module) -> None:
    """Registers them before that forward, in modules whose ``config`` asks for such outputs; none twice."""
    register = getattr(sys.modules.get(_LIBRARY), _REGISTER, None)
    if register is None:
        return
    for module in model.modules():
        config = getattr(module, "config", None)
        if any(getattr(config, f"output_{name}", False) for name in getattr(module, _RECORDABLE, None) or ()):
            register(module)
