"""Keeps a CUDA stream, and some of its multiprocessors, busy until a time has passed since a mark on it."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

# Blocks that spin: as many channels as NCCL uses on NVLink.
BLOCKS = 16


@triton.jit
def mark_time(mark):
    """Writes the time in ns."""
    tl.store(mark, globaltimer())


@triton.jit
def hold_until(mark, ns):
    """Spins until `ns` have passed since the mark."""
    end = tl.load(mark) + ns
    now = globaltimer()
    while now < end:
        now = globaltimer()


def mark(device: torch.device) -> Tensor:
    """A mark on the current stream: `[1]`, int64."""
    made = torch.empty(1, dtype=torch.int64, device=device)
    mark_time[(1,)](made)
    return made


def hold(made: Tensor, us: float, blocks: int = BLOCKS) -> None:
    """Holds the current stream until `us` behind a mark on it."""
    hold_until[(blocks,)](made, int(us * 1e3))
