"""Bytes that torch's CPU allocator gives out while something runs, as torch's profiler sees them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from torch.profiler import profile


class Allocated(NamedTuple):
    """Bytes given out and not got back, beside what was there before: at most, and at the end."""

    peak: int
    kept: int


def allocated_by(run: Callable[[], object]) -> Allocated:
    """Runs ``run()``. What it returns lives until it is counted."""
    with profile(profile_memory=True) as profiler:
        result = run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    del result
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    held = [*accumulate((count for _, count in changes), initial=0)]
    return Allocated(max(held), held[-1])
