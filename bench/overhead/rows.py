"""Rows of `bench.overhead`: numbers that can be compared. No process, no clock: tested without."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from bench.overhead.samples import AgreementTime, CompileTime, StepTime

# Of the first step's seconds; less: other programs ran.
MIN_CPU_SHARE = 0.9

V = TypeVar("V", bound=str)


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
        first_step_cpu_s: processor seconds of that, the C++ compiler's too.
        second_step_s: the same again, with nothing left to compile.
        passes_s: seconds of `first_step_s` in graphshard's passes and their checks; None where graphshard has no part.
        share: of `passes_s` in `first_step_s`.
        passes_per_layer_s: `passes_s` by layer.
    """

    backend: str
    variant: str
    num_layers: int
    num_ranks: int
    first_step_s: float
    first_step_cpu_s: float
    second_step_s: float
    passes_s: float | None
    share: float | None
    passes_per_layer_s: float | None
    regions: int
    programs: int

    @property
    def disturbed(self) -> bool:
        """Whether the processor was often busy with something else."""
        return self.first_step_cpu_s < MIN_CPU_SHARE * self.first_step_s


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
        time.first_step_cpu_s,
        time.second_step_s,
        time.passes_s if has_passes else None,
        time.passes_s / time.first_step_s if has_passes else None,
        time.passes_s / num_layers if has_passes else None,
        time.regions,
        time.programs,
    )


@dataclass(frozen=True)
class GrowthRow:
    """From one depth to the next.

    Attributes:
        first_step: ratio of seconds.
        added_layer_s: seconds of the first step by added layer.
        passes_exponent: n where passes' seconds grow as layers ** n; None where graphshard has no part.
    """

    backend: str
    variant: str
    from_layers: int
    to_layers: int
    first_step: float
    added_layer_s: float
    passes_exponent: float | None


def growth_rows(rows: Sequence[CompileRow]) -> list[GrowthRow]:
    """One row for each pair of neighbouring depths of a variant."""
    cases: dict[tuple[str, str], list[CompileRow]] = {}
    for row in rows:
        cases.setdefault((row.backend, row.variant), []).append(row)
    return [
        GrowthRow(
            few.backend,
            few.variant,
            few.num_layers,
            many.num_layers,
            many.first_step_s / few.first_step_s,
            (many.first_step_s - few.first_step_s) / (many.num_layers - few.num_layers),
            _exponent(few, many),
        )
        for case in cases.values()
        for few, many in pairwise(sorted(case, key=lambda row: row.num_layers))
    ]


def _exponent(few: CompileRow, many: CompileRow) -> float | None:
    if few.passes_s is None or many.passes_s is None:
        return None
    return math.log(many.passes_s / few.passes_s) / math.log(many.num_layers / few.num_layers)


@dataclass(frozen=True)
class AgreementRow:
    """What ranks ask each other, on the slower rank.

    Attributes:
        num_ranks: of them.
        num_buckets: of the program.
        contract_bytes: that are posted of it.
        program_ms: median and maximum of a program.
        entry_ms: the same of an entry, whose leader is elected.
        operations: on the store in steady state.
    """

    num_ranks: int
    num_buckets: int
    contract_bytes: int
    program_ms: tuple[float, float]
    entry_ms: tuple[float, float]
    operations: int


def agreement_row(num_ranks: int, num_buckets: int, times: Sequence[AgreementTime]) -> AgreementRow:
    """The slower rank's medians and maxima."""

    def slower(samples: Sequence[tuple[float, ...]]) -> tuple[float, float]:
        return max(1e3 * statistics.median(own) for own in samples), max(1e3 * max(own) for own in samples)

    return AgreementRow(
        num_ranks,
        num_buckets,
        times[0].contract_bytes,
        slower([found.first_s for found in times]),
        slower([found.election_s for found in times]),
        sum(found.operations for found in times),
    )
