"""Rows of the tables: what was measured becomes numbers that can be compared. No process, no clock: tested without."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from bench.samples import CompileTime, StepTime

V = TypeVar("V", bound=str)

MAX_SHARE = 0.05
# Seconds that grow as layers ** exponent: 1 is linear, 2 quadratic; the rest is room for noise.
MAX_EXPONENT = 1.2
# From the fewest to the most layers.
MAX_UNIT_GROWTH = 1.5


@dataclass(frozen=True)
class StepRow:
    """Host time of one variant.

    Attributes:
        forward_us: median.
        backward_us: median.
        total_us: median of the sums.
        low_us: lower quartile of the sums.
        high_us: upper quartile of the sums.
        ratio: of `total_us` to the reference's.
        steps: how many were measured.
    """

    backend: str
    variant: str
    forward_us: float
    backward_us: float
    total_us: float
    low_us: float
    high_us: float
    ratio: float
    steps: int


def step_rows(backend: str, samples: Mapping[V, Sequence[StepTime]], reference: V) -> list[StepRow]:
    """One row for each variant, in order; `reference` is the variant that ratios refer to."""
    totals = {variant: [1e6 * (t.forward_s + t.backward_s) for t in times] for variant, times in samples.items()}
    unit_us = statistics.median(totals[reference])
    rows = []
    for variant, times in samples.items():
        low_us, total_us, high_us = statistics.quantiles(totals[variant], n=4, method="inclusive")
        forward_us = 1e6 * statistics.median(t.forward_s for t in times)
        backward_us = 1e6 * statistics.median(t.backward_s for t in times)
        rows.append(
            StepRow(
                backend, variant, forward_us, backward_us, total_us, low_us, high_us, total_us / unit_us, len(times)
            )
        )
    return rows


@dataclass(frozen=True)
class CompileRow:
    """Compilation of one case, on the rank where the passes' share is largest.

    Attributes:
        first_step_s: forward and backward, compilation included.
        passes_s: seconds of it in graphshard's passes and their checks; None where graphshard has no part.
        share: `passes_s` of `first_step_s`.
        passes_per_layer_s: `passes_s` by layer.
    """

    backend: str
    variant: str
    num_layers: int
    num_ranks: int
    first_step_s: float
    second_step_s: float
    passes_s: float | None
    share: float | None
    passes_per_layer_s: float | None
    regions: int
    programs: int


def compile_row(backend: str, variant: str, num_layers: int, by_rank: Sequence[CompileTime]) -> CompileRow:
    """The row of one case, measured on each rank."""
    time = max(by_rank, key=lambda t: t.passes_s / t.first_step_s)
    has_passes = time.programs > 0
    return CompileRow(
        backend,
        variant,
        num_layers,
        len(by_rank),
        time.first_step_s,
        time.second_step_s,
        time.passes_s if has_passes else None,
        time.passes_s / time.first_step_s if has_passes else None,
        time.passes_s / num_layers if has_passes else None,
        time.regions,
        time.programs,
    )


@dataclass(frozen=True)
class Claim:
    """Something that is said of graphshard, and the number that was found.

    Attributes:
        says: the claim, with its bound.
        got: the number, as printed.
        holds: whether it does.
    """

    backend: str
    says: str
    got: str
    holds: bool


def compile_claims(rows: Sequence[CompileRow], whole: str, by_unit: str) -> list[Claim]:
    """Checks the claims on compile time, by backend.

    Args:
        rows: all cases.
        whole: variant that compiles the model as one region.
        by_unit: variant with a region per unit.
    """
    claims = []
    for backend in dict.fromkeys(row.backend for row in rows):
        cases = sorted((row for row in rows if row.backend == backend), key=lambda row: row.num_layers)
        for variant in (whole, by_unit):
            worst = max((row for row in cases if row.variant == variant), key=lambda row: row.share or 0.0)
            share = worst.share or 0.0
            claims.append(
                Claim(
                    backend,
                    f"{variant}: passes' share of the first step at most {MAX_SHARE:.0%}",
                    f"{share:.1%} ({worst.num_layers} layers)",
                    share <= MAX_SHARE,
                )
            )
        wholes = [row for row in cases if row.variant == whole]
        exponent = max(_exponent(few, many) for few, many in pairwise(wholes))
        claims.append(
            Claim(
                backend,
                f"{whole}: passes' seconds growing linearly, as layers ** n with n at most {MAX_EXPONENT}",
                f"n = {exponent:.2f}",
                exponent <= MAX_EXPONENT,
            )
        )
        units = [row for row in cases if row.variant == by_unit]
        growth = units[-1].first_step_s / units[0].first_step_s
        claims.append(
            Claim(
                backend,
                f"{by_unit}: first step nearly constant in depth, {units[0].num_layers} to {units[-1].num_layers} "
                f"layers at most {MAX_UNIT_GROWTH} x",
                f"{growth:.2f} x",
                growth <= MAX_UNIT_GROWTH,
            )
        )
    return claims


def _exponent(few: CompileRow, many: CompileRow) -> float:
    growth = (many.passes_s or 0.0) / (few.passes_s or math.inf)
    return math.log(growth) / math.log(many.num_layers / few.num_layers) if growth > 0 else 0.0
