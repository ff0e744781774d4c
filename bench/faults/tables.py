"""Rows of faults as text."""

from __future__ import annotations

from collections.abc import Sequence

from bench.faults.crash_runner import CrashRow
from bench.faults.outcomes import FaultRow
from bench.harness.tables import align

NUMBERS = ("injected", "right", "detected", "median s", "max s", "rank named", "unit named", "hangs")
CRASH_HEADER = ("crash", "ranks", "became", "s", "went on from", "losses", "passed over")
HEADER = ("fault", "ranks", *NUMBERS, "bad")
# What is neither right nor detected, nor a hang, in words.
BAD = {
    "untold": "every live rank ended with an error, and none names rank, unit or parameter",
    "apart": "some live ranks ended with an error, some as if nothing had been",
    "wrong": "all ranks ended well, with wrong results",
    "elsewhere": "nothing was injected",
}


def fault_table(rows: Sequence[FaultRow]) -> list[str]:
    """One line for each fault and number of ranks."""
    return align(HEADER, [_cells(row) for row in rows])


def _cells(row: FaultRow) -> tuple[str, ...]:
    counts = row.counts
    bad = ", ".join(f"{kind} {counts[kind]}" for kind in BAD if counts[kind])
    numbers = (row.times - counts["elsewhere"], counts["right"], counts["detected"])
    seconds = ("-" if s is None else f"{s:.1f}" for s in (row.median_s, row.max_s))
    named = (row.rank_named, row.unit_named, counts["hang"])
    return (row.fault, str(row.ranks), *map(str, numbers), *seconds, *map(str, named), bad or "-")


def crash_table(rows: Sequence[CrashRow]) -> list[str]:
    """One line for each job that crashed."""
    return align(CRASH_HEADER, [_crash_cells(row) for row in rows]) if rows else []


def _crash_cells(row: CrashRow) -> tuple[str, ...]:
    seconds = "-" if row.seconds is None else f"{row.seconds:.0f}"
    began = ", ".join(map(str, row.began)) or "-"
    difference = f"{row.difference:.0e}" if row.difference else "bitwise"
    return (row.crash, str(row.ranks), row.kind, seconds, began, difference, str(row.passed_over))


def kind_lines(rows: Sequence[FaultRow]) -> list[str]:
    """What the words in the last column mean, and the sum."""
    jobs = sum(row.times for row in rows)
    good = sum(row.counts["right"] + row.counts["detected"] for row in rows)
    hangs = sum(row.counts["hang"] for row in rows)
    words = [f"{kind}: {text}" for kind, text in BAD.items() if any(row.counts[kind] for row in rows)]
    return [*words, f"{good} of {jobs} jobs right or detected, {hangs} hangs"]
