"""Rows as text: what the tables of all benches share."""

from __future__ import annotations

from collections.abc import Sequence

from bench.harness.claims import Claim
from bench.harness.machine import MAX_IDLE_LOAD, Gpu, Machine


def align(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Columns two spaces apart: the first two to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (header, *lines)
    ]


def machine_lines(machine: Machine) -> list[str]:
    """What the measurement ran on."""
    lines = [
        f"torch {machine.torch_version}, Python {machine.python_version}, {machine.system}, "
        f"{machine.cpu}, {machine.cores} cores, load average {machine.load:.1f}"
    ]
    if machine.busy:
        lines.append("NOTE: other programs ran when this one began: these timings are no results")
    return lines


def load_lines(machine: Machine, load: float, num_ranks: int) -> list[str]:
    """The load of the machine, before and after.

    Args:
        machine: when the bench began.
        load: average of the last minute, when all is measured; the ranks' own work included.
        num_ranks: that ran at once.
    """
    lines = [f"load average {machine.load:.1f} before, {load:.1f} after ({num_ranks} ranks ran)"]
    if load > num_ranks + MAX_IDLE_LOAD * machine.cores:
        lines.append("NOTE: other programs ran while this one did: these timings are no results")
    return lines


def gpu_line(gpu: Gpu) -> str:
    """The GPU that the measurement ran on."""
    return (
        f"{gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB, driver {gpu.driver_version}, "
        f"CUDA {gpu.cuda_version}, Triton {gpu.triton_version}"
    )


def claim_table(claims: Sequence[Claim]) -> list[str]:
    """Each claim, the number found, and yes or no."""
    words = {True: "yes", False: "NO", None: "-"}
    return align(
        ("backend", "claim", "got", "holds"),
        [(claim.backend, claim.says, claim.got, words[claim.holds]) for claim in claims],
    )
