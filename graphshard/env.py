"""Environment variables, each read in one place and checked."""

from __future__ import annotations

import os
import tempfile
from difflib import get_close_matches
from pathlib import Path

_DIGITS = 10
_PREFIX = "GRAPHSHARD_"
_NAMES = ("VERIFY", "VERIFY_MIB", "DUMP", "FAULTS", "TWINS", "DISABLE")


def unknown() -> dict[str, str]:
    """Variables that are named like graphshard's, and are none of them -> what there is instead."""
    names = [name.removeprefix(_PREFIX) for name in sorted(os.environ) if name.startswith(_PREFIX)]
    likely = {name: get_close_matches(name, _NAMES, 1) or _NAMES for name in names if name not in _NAMES}
    return {_PREFIX + name: ", ".join(_PREFIX + known for known in found) for name, found in likely.items()}


def verify_level() -> int:
    """``GRAPHSHARD_VERIFY``: 0 no checks, 1 (default) structure after every pass, 2 also recomputes every fake value,
    and runs the graph before and after every pass.

    Raises:
        ValueError: if it is not one of 0, 1 and 2.
    """
    raw = os.environ.get("GRAPHSHARD_VERIFY", "1")
    if raw not in ("0", "1", "2"):
        raise ValueError(f"GRAPHSHARD_VERIFY: got {raw!r}, want 0, 1 or 2")
    return int(raw)


def verify_limit_mib() -> int:
    """``GRAPHSHARD_VERIFY_MIB``: graphs whose values, on a few ranks, take more MiB are not run by level 2; 256.

    Raises:
        ValueError: if it is no whole number from 0 up.
    """
    raw = os.environ.get("GRAPHSHARD_VERIFY_MIB", "256")
    if not (raw.isascii() and raw.isdecimal() and len(raw) < _DIGITS):
        raise ValueError(f"GRAPHSHARD_VERIFY_MIB: got {raw!r}, want a number of MiB")
    return int(raw)


def dump_dir() -> Path | None:
    """``GRAPHSHARD_DUMP``: the directory that gets one file per pass and program; unset or empty: no dumps."""
    raw = os.environ.get("GRAPHSHARD_DUMP", "")
    return Path(raw) if raw else None


def fault_dir() -> Path:
    """``GRAPHSHARD_FAULTS``: the directory that gets what ranks say when one hangs or dies; unset or empty: one below
    the system's temporary directory.
    """
    raw = os.environ.get("GRAPHSHARD_FAULTS", "")
    return Path(raw) if raw else shared_fault_dir()


def shared_fault_dir() -> Path:
    """Where that is by default: in a folder that all users of a machine share."""
    return Path(tempfile.gettempdir(), f"graphshard-faults-{os.getuid()}")


def traces_twins() -> bool | None:
    """``GRAPHSHARD_TWINS``: 1: Dynamo traces two of blocks that are alike; 0: it traces all; unset: None, as 1.

    Raises:
        ValueError: if it is something else.
    """
    raw = os.environ.get("GRAPHSHARD_TWINS")
    if raw not in (None, "0", "1"):
        raise ValueError(f"GRAPHSHARD_TWINS: got {raw!r}, want 0 or 1")
    return None if raw is None else raw == "1"


def place_on_host() -> tuple[int, int]:
    """This rank's number among those of its host, and how many these are, as torchrun says; else 0 of 1."""
    try:
        rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1
    return (rank, ranks) if 0 <= rank < ranks else (0, 1)


def disabled_passes(optional: frozenset[str]) -> frozenset[str]:
    """``GRAPHSHARD_DISABLE``: names of optional passes to leave out, separated by commas.

    Args:
        optional: names of the passes that a program can do without.

    Raises:
        ValueError: for a name that is not an optional pass.
    """
    names = _disabled()
    if unknown := sorted(names - optional):
        raise ValueError(f"GRAPHSHARD_DISABLE: got {', '.join(unknown)}, want some of: {', '.join(sorted(optional))}")
    return names


def is_disabled(name: str) -> bool:
    """Whether ``GRAPHSHARD_DISABLE`` names a pass."""
    return name in _disabled()


def _disabled() -> frozenset[str]:
    raw = os.environ.get("GRAPHSHARD_DISABLE", "")
    return frozenset(name.strip() for name in raw.split(",") if name.strip())
