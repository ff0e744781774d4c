"""Host overhead and compile time: `python -m bench.overhead [--quick] [--backend B] [--json FILE]`.

Prints what graphshard costs the host, in a step and in the first one, against `torch.compile` and FSDP2. The exit
status is 0 whatever the numbers are; a variant that computes something else, or that fell back, is an error.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from bench.compile_time import measure_compile
from bench.machine import Machine
from bench.models import PARAMS_PER_BLOCK
from bench.rows import Claim, CompileRow, StepRow, compile_claims, compile_row, step_rows
from bench.step_time import STEPS_PER_TURN, measure_steps
from bench.tables import claim_table, compile_table, machine_lines, step_table
from bench.variants import REFERENCE
from graphshard.env import verify_level

BACKENDS = ("inductor", "aot_eager")


def say(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)


def measure_step_rows(backends: list[str], num_params: int, turns: int) -> list[StepRow]:
    """Measures and prints host time."""
    say(
        "",
        f"Host time of a training step (forward, backward; no optimizer): {num_params} small parameters, "
        f"{num_params // PARAMS_PER_BLOCK} units",
        "world size 1 (gloo, HashStore): programs hold no collective. One process a variant, 1 thread, in turns;",
        f"medians of {turns * STEPS_PER_TURN} steps; ratio: of total to {REFERENCE}",
        "",
    )
    rows = []
    for backend in backends:
        rows += step_rows(backend, measure_steps(backend, num_params, turns), REFERENCE)
    say(*step_table(rows))
    return rows


def measure_compile_rows(
    backends: list[str], depths: list[int], num_ranks: int
) -> tuple[list[CompileRow], list[Claim]]:
    """Measures and prints compile time."""
    say(
        "",
        f"Compile time of a decoder (dim 64) on {num_ranks} gloo ranks that compile at the same time",
        "a fresh process and Inductor cache for each case, 1 compile thread, an unrelated function compiled before.",
        "first step: forward and backward, compilation included. passes: all of graphshard's, on joint graphs and",
        f"programs, with their checks (GRAPHSHARD_VERIFY={verify_level()}); the rank with the largest share",
        "",
    )
    rows = []
    for backend in backends:
        for num_layers in depths:
            measured = measure_compile(backend, num_layers, num_ranks)
            rows += [compile_row(backend, variant, num_layers, by_rank) for variant, by_rank in measured.items()]
    rows.sort(key=lambda row: (backends.index(row.backend), row.variant, row.num_layers))
    claims = compile_claims(rows, "graphshard", "graphshard, regions=unit") if len(depths) > 1 else []
    say(*compile_table(rows), "", *claim_table(claims))
    return rows, claims


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.overhead", description="what graphshard costs the host")
    parser.add_argument("--backend", choices=[*BACKENDS, "both"], default="both")
    parser.add_argument("--only", choices=["step", "compile"], help="measure one of the two")
    parser.add_argument("--params", type=int, default=300, help="parameters of the model whose step is timed")
    parser.add_argument("--turns", type=int, default=60, help=f"of {STEPS_PER_TURN} steps, for each variant")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 32], help="depths of the decoder")
    parser.add_argument("--ranks", type=int, default=2, help="ranks that compile the decoder")
    parser.add_argument("--json", type=Path, help="writes machine, rows and claims to this file")
    parser.add_argument("--quick", action="store_true", help="small and soon over: shows that it works, no results")
    args = parser.parse_args()
    if args.quick:
        args.params, args.turns, args.layers = 60, 4, [2, 4]
        args.backend = "aot_eager" if args.backend == "both" else args.backend
    backends = list(BACKENDS) if args.backend == "both" else [args.backend]
    machine = Machine.this()
    say(*machine_lines(machine))
    if args.quick:
        say("NOTE: --quick measures too little for results")
    steps = measure_step_rows(backends, args.params, args.turns) if args.only != "compile" else []
    compiles, claims = (
        measure_compile_rows(backends, sorted(set(args.layers)), args.ranks) if args.only != "step" else ([], [])
    )
    if args.json is not None:
        written = {
            "machine": asdict(machine),
            "quick": args.quick,
            "verify_level": verify_level(),
            "step": [asdict(row) for row in steps],
            "compile": [asdict(row) for row in compiles],
            "claims": [asdict(claim) for claim in claims],
        }
        args.json.write_text(json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
