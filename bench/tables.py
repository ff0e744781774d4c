"""Rows as text."""

from __future__ import annotations

from collections.abc import Sequence

from bench.claims import Claim
from bench.machine import Gpu, Machine
from bench.rows import CompileRow, DispatchRow, FlipRow, GrowthRow, StepRow


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


def gpu_line(gpu: Gpu) -> str:
    """The GPU that the measurement ran on."""
    return (
        f"{gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB, driver {gpu.driver_version}, "
        f"CUDA {gpu.cuda_version}, Triton {gpu.triton_version}"
    )


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


def claim_table(claims: Sequence[Claim]) -> list[str]:
    """Each claim, the number found, and yes or no."""
    words = {True: "yes", False: "NO", None: "-"}
    return align(
        ("backend", "claim", "got", "holds"),
        [(claim.backend, claim.says, claim.got, words[claim.holds]) for claim in claims],
    )


def dispatch_table(rows: Sequence[DispatchRow]) -> list[str]:
    """What choosing programs takes, by case."""
    return align(
        ("case", "", "bind us", "states us", "look-up us", "sum us", "quartiles us", "step us", "share"),
        [
            (
                row.case,
                "",
                f"{row.bind_us:,.0f}",
                f"{row.states_us:,.0f}",
                f"{row.look_up_us:,.0f}",
                f"{row.chosen_us:,.0f}",
                f"{row.low_us:,.0f} - {row.high_us:,.0f}",
                f"{row.step_us:,.0f}",
                f"{row.share:.1%}",
            )
            for row in rows
        ],
    )


def flip_table(rows: Sequence[FlipRow]) -> list[str]:
    """What flipping flags takes, by flag."""
    return align(
        ("flag", "lowered", "captured", "first ms", "lowering ms", "later us", "without us", "set us"),
        [
            (
                row.flag,
                row.lowered,
                str(row.regions),
                f"{row.first_ms:,.1f}",
                f"{row.lowering_ms:,.1f}",
                f"{row.later_us:,.0f}",
                f"{row.still_us:,.0f}",
                f"{row.set_us:,.0f}",
            )
            for row in rows
        ],
    )
