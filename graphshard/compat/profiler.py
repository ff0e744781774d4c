"""What is private of torch's profiler, each behind a plain function."""

from __future__ import annotations

import torch
from torch.autograd.profiler import profile


def profiler_active() -> bool:
    """Whether a profiler of torch is on in this thread."""
    return bool(torch._C._autograd._profiler_enabled())


def profiled_names(profiler: profile) -> list[str]:
    """Names of what a profiler on the CPU saw. `function_events` would build a tree first, in 20 times the time."""
    results = profiler.kineto_results
    return [] if results is None else [event.name() for event in results.events()]
