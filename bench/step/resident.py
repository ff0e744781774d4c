"""Resident memory of this process, as the kernel counts it: code and the interpreter's objects included."""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
# Source: proc(5), /proc/pid/clear_refs: 5 resets the peak resident set size to the current one.
RESET_PEAK = "5"


def give_back_freed() -> None:
    """Returns memory that is free to the kernel: the allocator keeps it otherwise, and it counts as resident."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def reset_peak() -> bool:
    """Makes `peak_bytes` begin anew; returns whether the kernel can."""
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
    except OSError:
        return False
    return _status_bytes("VmHWM") is not None


def peak_bytes() -> int:
    """Most bytes that were resident since `reset_peak`, or since the process began where that returned False."""
    if (peak := _status_bytes("VmHWM")) is not None:
        return peak
    in_kib = sys.platform != "darwin"
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if in_kib else 1)


def resident_bytes() -> int:
    """Bytes that are resident now, or `peak_bytes` where the kernel does not say."""
    now = _status_bytes("VmRSS")
    return peak_bytes() if now is None else now


def _status_bytes(field: str) -> int | None:
    if not STATUS.exists():
        return None
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None
