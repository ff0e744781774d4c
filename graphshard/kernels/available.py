"""What the kernel can copy, and where it runs."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from functools import cache

import torch

from graphshard import env

# fp64 and integers are moved, but not cast.
CAST = frozenset((torch.float32, torch.bfloat16, torch.float16))
_ITEM_BYTES = (1, 2, 4, 8)
# Hardware that converts to bf16.
_LEAST_CAPABILITY = (8, 0)


def can_copy(side: torch.dtype, flat: torch.dtype, scaled: bool = False) -> bool:
    """Whether the kernel copies between tensors and a buffer of these dtypes, with a factor or without."""
    return (side == flat and not scaled and flat.itemsize in _ITEM_BYTES) or (side in CAST and flat in CAST)


@cache
def why_unfused(device: torch.device) -> str | None:
    """Why copies on `device` are torch's own; None: they are fused."""
    if importlib.util.find_spec("triton") is None:
        return "copies are not fused: triton is not installed; pip install triton"
    if device.type == "cpu":
        import triton  # the interpreter runs there, in tests

        interpreted: bool = triton.knobs.runtime.interpret
        return None if interpreted else "copies are not fused on cpu: Triton has no compiler for it"
    if device.type != "cuda":
        return f"copies are not fused on {device.type}"
    if torch.version.hip is not None:
        return "copies are not fused: ROCm is not tested"
    got = torch.cuda.get_device_capability(device)
    if got < _LEAST_CAPABILITY:
        least = ".".join(map(str, _LEAST_CAPABILITY))
        return f"copies are not fused: got compute capability {got[0]}.{got[1]}, want {least} or above"
    return None


def fuses_on(device: torch.device | None, say: Callable[[str], object]) -> bool:
    """Whether the copies of a program on `device` are fused. On accelerators, `say` is told why not.

    Where users leave the pass out, which is said once elsewhere, plans must not count on it either.
    """
    if device is None or device.type == "cpu" or env.is_disabled("fuse_copies"):  # on CPU there is nothing to gain
        return False
    if (why := why_unfused(device)) is not None:
        say(why)
    return why is None


@cache
def warn_once(why: str) -> None:
    """Warns, the first time in a process."""
    warnings.warn(f"graphshard: {why}", RuntimeWarning, stacklevel=3)
