"""What every bench prints."""

from __future__ import annotations

import sys


def say(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)


def say_progress(case: str) -> None:
    """On stderr: a full run takes minutes."""
    print(f"... {case}", file=sys.stderr, flush=True)
