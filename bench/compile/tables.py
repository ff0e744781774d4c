"""Rows of `bench.compile` as text."""

from __future__ import annotations

from collections.abc import Sequence

from bench.compile.fake_cuda import FakeRow
from bench.compile.phases import ALL_PHASES
from bench.compile.rows import CompileRow, GrowthRow
from bench.harness.tables import align


def compile_table(rows: Sequence[CompileRow]) -> list[str]:
    """First steps, and where their seconds go."""
    counts = ("graphs", "kernels", "programs")
    header = (
        "backend",
        "system",
        "cache",
        "blocks",
        "first step s",
        "ratio",
        "to cold",
        "cpu s",
        "second s",
        *ALL_PHASES,
        *counts,
    )
    return align(
        header,
        [
            (
                row.backend,
                row.label,
                row.cache,
                str(row.blocks),
                f"{row.step_s:.2f}",
                _number(row.ratio),
                _number(row.to_cold),
                f"{row.cpu_s:.2f}",
                f"{row.second_step_s:.2f}",
                *(f"{row.phases[name]:.2f}" for name in ALL_PHASES),
                str(row.graphs),
                str(row.kernels),
                str(row.programs) if row.plan is not None else "-",
            )
            for row in rows
        ],
    )


def _number(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def growth_table(rows: Sequence[GrowthRow]) -> list[str]:
    """How first steps grow with depth."""
    return align(
        ("backend", "system", "blocks", "traces ms/added block", "everything else", "whole step", "passes ~ blocks **"),
        [
            (
                row.backend,
                row.label,
                f"{row.from_blocks} -> {row.to_blocks}",
                f"{1e3 * row.traces_s_per_block:.1f}",
                f"{row.others:.2f} x",
                f"{row.whole:.2f} x",
                "-" if row.passes_exponent is None else f"{row.passes_exponent:.2f}",
            )
            for row in rows
        ],
    )


def fake_table(rows: Sequence[FakeRow]) -> list[str]:
    """What is traced and lowered without a GPU."""
    return align(
        (
            "model",
            "blocks",
            "traces",
            "front passes",
            "partitioner",
            "passes",
            "planner",
            "nodes",
            "stretches",
            "different",
        ),
        [
            (
                row.model,
                str(row.blocks),
                f"{row.traces_s:.2f}",
                f"{row.front_passes_s:.2f}",
                f"{row.partitioner_s:.2f}",
                f"{row.passes_s:.2f}",
                f"{row.planner_s:.2f}",
                str(row.nodes),
                str(row.stretches),
                str(row.different),
            )
            for row in rows
        ],
    )
