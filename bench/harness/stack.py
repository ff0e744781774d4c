"""Depths of the stack that steps are measured at: at some they are slow."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

# CPython keeps the frames of Python functions in chunks of 16 KiB, about 137 calls of `deeper`. Where the hottest
# calls of a step lie just across the end of a chunk, each of them maps and unmaps memory: three times the seconds of a
# forward of 300 operators, by chance. So steps start at depths all over a chunk, and the median is of none of those.
STACK_DEPTHS = 137
DEPTH_STRIDE = 41

T = TypeVar("T")


def deeper(levels: int, step: Callable[[], T]) -> T:
    """Calls `step` with `levels` more frames on the stack."""
    return step() if levels == 0 else deeper(levels - 1, step)
