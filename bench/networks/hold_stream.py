"""Keeps a CUDA stream, and some of its multiprocessors, busy until a time has passed since a mark on it.

The clock is the GPU's `%globaltimer`, in ns, one for all its multiprocessors. How often it moves on is the hardware's
to say: every microsecond on some GPUs, more often on others.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

# Blocks that spin: as many channels as NCCL uses on NVLink.
BLOCKS = 16
MAX_US = 2e6  # in ns an int32, so that one compiled form serves all times


@triton.jit
def mark_time(mark):
    """Writes the time in ns."""
    tl.store(mark, globaltimer())


@triton.jit(do_not_specialize=["ns"])
def hold_until(mark, ns):
    """Spins until `ns` have passed since the mark.

    A look at the clock takes more than a nanosecond: after `ns` of them the time is over, even by a clock that stands.
    """
    end = tl.load(mark) + ns
    left = ns
    now = globaltimer()
    while (now < end) & (left > 0):
        now = globaltimer()
        left -= 1


def mark(device: torch.device) -> Tensor:
    """A mark on the current stream, which is one of `device`: `[1]`, int64."""
    made = torch.empty(1, dtype=torch.int64, device=device)
    mark_time[(1,)](made)
    return made


def hold(made: Tensor, us: float, blocks: int = BLOCKS) -> None:
    """Holds the current stream until `us` behind a mark on it.

    Raises:
        ValueError: longer than `MAX_US`.
    """
    if us > MAX_US:
        raise ValueError(f"hold: us: got {us:g}, want at most {MAX_US:g}")
    hold_until[(blocks,)](made, int(us * 1e3))
