"""Whether other programs took the processor from what is measured."""

from __future__ import annotations

import os
from collections.abc import Iterable

# Of the seconds on the clock; less: other programs ran.
MIN_CPU_SHARE = 0.9


def cpu_seconds() -> float:
    """Processor seconds of this process and of those that it ran to the end."""
    return sum(os.times()[:4])


def is_disturbed(wall_s: float, cpu_s: float) -> bool:
    """Whether the processor was often busy with something else."""
    return cpu_s < MIN_CPU_SHARE * wall_s


def disturbed_lines(disturbed: Iterable[bool]) -> list[str]:
    """Says so if other programs ran during some cases."""
    cases = list(disturbed)
    count = sum(cases)
    return [f"NOTE: in {count} of {len(cases)} cases the processor was often busy with something else"] if count else []
