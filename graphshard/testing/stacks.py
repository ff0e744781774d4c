"""The stack of a process that does not answer, and the end of what it wrote."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

STACK_TIMEOUT_S = 3.0
MAX_OUTPUT_BYTES = 8000


def dump_stack(pid: int, stack_file: str) -> str:
    """Asks a worker's faulthandler for the stack of each of its threads and returns it.

    Args:
        pid: the process.
        stack_file: the file that its faulthandler writes to.
    """
    path = Path(stack_file)
    before = path.stat().st_size if path.exists() else 0
    try:
        os.kill(pid, signal.SIGUSR1)
    except ProcessLookupError:
        return "the process ended before it could say where it was"
    deadline = time.monotonic() + STACK_TIMEOUT_S
    seen = before
    while time.monotonic() < deadline:
        time.sleep(0.1)
        size = path.stat().st_size if path.exists() else 0
        if size > before and size == seen:  # it has stopped writing
            return path.read_bytes()[before:].decode(errors="replace")
        seen = size
    return f"none: the process did not say where it is within {STACK_TIMEOUT_S:g} s"


def innermost_frame(stack: str) -> str:
    """Where the main thread stands in a stack as faulthandler writes it: it comes last, its innermost frame first."""
    frames = re.findall(r"\(most recent call first\):\n\s+File \"([^\"]*)\", line (\d+) in (.*)", stack)
    if not frames:
        return ""
    file, line, function = frames[-1]
    return f"in {function} ({Path(file).name}:{line})"


def last_output(file: str) -> str:
    """The last `MAX_OUTPUT_BYTES` of a file; empty when there is none."""
    path = Path(file)
    if not path.exists():
        return ""
    data = path.read_bytes()
    kept = data[-MAX_OUTPUT_BYTES:].decode(errors="replace")
    return kept if len(data) <= MAX_OUTPUT_BYTES else f"[... {len(data) - MAX_OUTPUT_BYTES} bytes before]\n{kept}"
