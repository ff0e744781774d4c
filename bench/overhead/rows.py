"""Rows of `bench.overhead`: numbers that can be compared. No process, no clock: tested without."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from bench.overhead.samples import AgreementTime, StepTime

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
