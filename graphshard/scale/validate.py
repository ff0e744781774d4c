"""Predicted and published throughput, side by side.

Each cluster has one factor, of the rate of matmuls: clocks, power and kernels differ between clusters. It is fitted to
one row, which says so; the others are predicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graphshard.scale.estimate import Setting, StepEstimate, Workload, estimate_step
from graphshard.scale.models import ModelChoice, make_workload
from graphshard.scale.published import CLUSTERS, ROWS, PublishedRow

_TOLERANCE = 1e-4
_MOST_TRIES = 20


@dataclass(frozen=True)
class RowComparison:
    """One published row and what is predicted for it.

    Attributes:
        row: as published.
        efficiency: of matmuls, in parts of the table's rate.
        predicted: one step.
        fitted: whether `efficiency` was fitted to any row of the cluster.
    """

    row: PublishedRow
    efficiency: float
    predicted: StepEstimate
    fitted: bool

    @property
    def error(self) -> float:
        """Predicted over published tokens per second, less 1."""
        return self.predicted.tokens_per_s / self.row.tokens_per_s - 1.0


def compare(clusters: Iterable[str] = tuple(CLUSTERS)) -> list[RowComparison]:
    """Predicts every published row of some clusters.

    Raises:
        ValueError: a cluster is not known.
    """
    found: list[RowComparison] = []
    for cluster in clusters:
        if cluster not in CLUSTERS:
            raise ValueError(f"cluster: got {cluster!r}, want some of {', '.join(CLUSTERS)}")
        workloads: dict[ModelChoice, Workload] = {}
        rows = [row for row in ROWS if row.cluster == cluster]
        for row in rows:
            if row.model not in workloads:
                workloads[row.model] = make_workload(row.model)
        fitted = next((row for row in rows if row.calibrates), None)
        efficiency = 1.0 if fitted is None else fit_efficiency(fitted, workloads[fitted.model])
        for row in rows:
            predicted = predict(row, workloads[row.model], efficiency)
            found.append(RowComparison(row, efficiency, predicted, fitted is not None))
    return found


def predict(row: PublishedRow, workload: Workload, efficiency: float) -> StepEstimate:
    """One step of a published run, on matmuls `efficiency` times as fast as the table's."""
    machine = CLUSTERS[row.cluster].machine(efficiency)
    return estimate_step(
        workload,
        Setting(
            machine,
            row.layout,
            plan="fsdp2",
            accumulation=row.accumulation,
            sequence_ranks=row.sequence_ranks,
        ),
    )


def fit_efficiency(row: PublishedRow, workload: Workload) -> float:
    """The factor with which a row's prediction is what was published: the secant method on its inverse.

    Raises:
        ValueError: there is none: what is not matmul takes longer than the whole step took.
    """
    slowdown, step = 1.0, 0.25

    def excess(slowdown: float) -> float:
        return row.tokens_per_s / predict(row, workload, 1.0 / slowdown).tokens_per_s - 1.0

    before = excess(slowdown)
    for _ in range(_MOST_TRIES):
        if abs(before) < _TOLERANCE:
            return 1.0 / slowdown
        now = excess(slowdown + step)
        slowdown, step = slowdown + step, -now * step / (now - before) if now != before else step
        before = now
        if slowdown + step <= 0.0:
            break
    raise ValueError(f"{row.name} on {row.cluster}: no rate of matmuls explains {row.tokens_per_s} tokens per second")


def table(comparisons: Sequence[RowComparison]) -> str:
    """The comparison as a table, in Markdown."""
    lines = [
        "| cluster | model and layout | published tokens/s/GPU | predicted | error | factor | exposed | peak GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in comparisons:
        factor = f"{one.efficiency:.3f}" + (
            " (fitted here)" if one.row.calibrates else "" if one.fitted else " (not fitted)"
        )
        predicted = one.predicted
        lines.append(
            f"| {one.row.cluster} | {one.row.name} | {one.row.tokens_per_s:,.0f} | {predicted.tokens_per_s:,.0f} | "
            f"{round(one.error, 3) + 0.0:+.1%} | {factor} | {predicted.exposed_us / predicted.step_us:.1%} | "
            f"{predicted.peak_bytes / 2**30:.1f} |"
        )
    return "\n".join(lines) + "\n"
