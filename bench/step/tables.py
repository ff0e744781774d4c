"""Rows of `bench.step` as text."""

from __future__ import annotations

from collections.abc import Sequence

from bench.harness.machine import Machine
from bench.harness.tables import align, load_lines
from bench.step.rows import FIRST_TOLERANCE, LATER_TOLERANCE, MAX_SPREAD, CheckRow, TrainingRow

MIB = 2**20
HEADER = (
    "system", "plan", "backend", "step ms", "quartiles ms", "ratio", "target", "peak MiB", "idle MiB", "compile s",
    "ahead from step", "gathers", "reduce-scatters", "all-reduces",
)  # fmt: skip


def training_table(rows: Sequence[TrainingRow], checks: Sequence[CheckRow]) -> list[str]:
    """Steps of one model by system, and the target of each."""
    return align(
        HEADER,
        [
            (
                row.system,
                row.plan or "-",
                row.backend,
                f"{row.step_ms:.1f}",
                f"{row.low_ms:.1f} - {row.high_ms:.1f}",
                "-" if row.ratio is None else f"{row.ratio:.2f}",
                _target(row),
                f"{row.peak_rss_bytes / MIB:.0f}",
                f"{check.idle_rss_bytes / MIB:.0f}",
                f"{row.compile_s:.1f}",
                "-" if row.ahead_from is None else str(row.ahead_from),
                str(check.all_gathers),
                str(check.reduce_scatters),
                str(check.all_reduces),
            )
            for row, check in zip(rows, checks, strict=True)
        ],
    )


def _target(row: TrainingRow) -> str:
    if row.target is None:
        return "-"
    return f"{row.target:.2f}" + ("" if row.met is None else " yes" if row.met else " NO")


def checks_line(checks: Sequence[CheckRow]) -> str:
    """How far apart what the systems computed is; they were compared before."""
    first, later = (_spread([getattr(row, name) for row in checks]) for name in ("first_loss", "later_loss"))
    grads = max(row.grad_difference for row in checks)
    return (
        f"loss {checks[0].first_loss:.4f} -> {checks[0].later_loss:.4f}; largest relative differences: first loss "
        f"{first:.0e}, norm of a parameter's gradient {grads:.0e} (at most {FIRST_TOLERANCE:.0e}), loss of the first "
        f"turn {later:.0e} (at most {LATER_TOLERANCE:.0e})"
    )


def _spread(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / abs(values[0])


def noise_lines(
    rows: Sequence[TrainingRow], checks: Sequence[CheckRow], machine: Machine, load: float, num_ranks: int
) -> list[str]:
    """The load of the machine, and what speaks against the numbers.

    Args:
        rows: of all models.
        checks: beside them.
        machine: when the bench began.
        load: average of the last minute, when all is measured; the ranks' own work included.
        num_ranks: that ran at once.
    """
    lines = load_lines(machine, load, num_ranks)
    if disturbed := sum(row.disturbed for row in rows):
        lines.append(
            f"NOTE: in {disturbed} of {len(rows)} rows the quartiles lie more than {MAX_SPREAD:.0%} of the median apart"
        )
    if not all(check.peak_is_of_steps for check in checks):
        lines.append("NOTE: this kernel does not reset peaks: they are those since the process began, compiling too")
    return lines
