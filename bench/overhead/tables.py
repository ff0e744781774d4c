"""Rows of `bench.overhead` as text."""

from __future__ import annotations

from collections.abc import Sequence

from bench.harness.tables import align
from bench.overhead.rows import CompileRow, GrowthRow, StepRow


def step_table(rows: Sequence[StepRow]) -> list[str]:
    """Host time by backend and variant."""
    header = ("backend", "variant", "forward us", "backward us", "total us", "quartiles us", "ratio")
    return align(
        header,
        [
            (
                row.backend,
                row.variant,
                f"{row.forward_us:,.0f}",
                f"{row.backward_us:,.0f}",
                f"{row.total_us:,.0f}",
                f"{row.low_us:,.0f} - {row.high_us:,.0f}",
                f"{row.ratio:.2f}",
            )
            for row in rows
        ],
    )


def compile_table(rows: Sequence[CompileRow]) -> list[str]:
    """Compile time by backend, variant and depth."""
    passes = ("passes s", "share", "ms/layer", "regions", "programs")
    header = ("backend", "variant", "layers", "first step s", "cpu s", *passes)
    return align(
        header,
        [
            (
                row.backend,
                row.variant,
                str(row.num_layers),
                f"{row.first_step_s:.2f}",
                f"{row.first_step_cpu_s:.2f}",
                *(
                    ("-", "-", "-", "-", "-")
                    if row.passes_s is None or row.share is None or row.passes_per_layer_s is None
                    else (
                        f"{row.passes_s:.3f}",
                        f"{row.share:.1%}",
                        f"{1e3 * row.passes_per_layer_s:.1f}",
                        str(row.regions),
                        str(row.programs),
                    )
                ),
            )
            for row in rows
        ],
    )


def disturbed_lines(rows: Sequence[CompileRow]) -> list[str]:
    """Says so if other programs ran during some cases."""
    count = sum(row.disturbed for row in rows)
    return [f"NOTE: in {count} of {len(rows)} cases the processor was often busy with something else"] if count else []


def growth_table(rows: Sequence[GrowthRow]) -> list[str]:
    """How compile time grows with depth."""
    return align(
        ("backend", "variant", "layers", "first step", "s/added layer", "passes ~ layers **"),
        [
            (
                row.backend,
                row.variant,
                f"{row.from_layers} -> {row.to_layers}",
                f"{row.first_step:.2f} x",
                f"{row.added_layer_s:.3f}",
                "-" if row.passes_exponent is None else f"{row.passes_exponent:.2f}",
            )
            for row in rows
        ],
    )
