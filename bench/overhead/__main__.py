"""Host overhead: `python -m bench.overhead [--quick] [--backend B] [--json FILE]`.

Prints what graphshard costs the host in a step, against `torch.compile` and FSDP2, and what ranks take to agree. The
exit status is 0 whatever the numbers are; a variant that computes something else, or that fell back, is an error.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from bench.harness.claims import Claim
from bench.harness.machine import Machine
from bench.harness.models import PARAMS_PER_BLOCK
from bench.harness.printing import say, say_progress
from bench.harness.tables import claim_table, machine_lines
from bench.harness.variants import REFERENCE, VARIANTS
from bench.overhead.agreement_time import REPEATS, measure_agreement
from bench.overhead.claims import check_agreement
from bench.overhead.rows import AgreementRow, StepRow, agreement_row, step_rows
from bench.overhead.step_time import STEPS_PER_TURN, measure_steps
from bench.overhead.tables import step_table
from graphshard.env import verify_level

BACKENDS = ("inductor", "aot_eager")


def measure_step_rows(backends: list[str], num_params: int, turns: int) -> list[StepRow]:
    """Measures and prints host time."""
    rows = []
    for backend in backends:
        say_progress(f"steps of {len(VARIANTS)} variants, {backend}")
        rows += step_rows(backend, measure_steps(backend, num_params, turns), REFERENCE)
    units = num_params // PARAMS_PER_BLOCK
    say(
        "",
        f"Host time of a training step (forward, backward; no optimizer): {num_params} small parameters, {units} units",
        "world size 1 (gloo, HashStore): programs hold no collective. A process for each variant, 1 thread, garbage",
        f"collector off, in turns; medians of {turns * STEPS_PER_TURN} steps; ratio: total to that of {REFERENCE}",
        "",
        *step_table(rows),
    )
    return rows


def measure_agreement_row(num_ranks: int, num_buckets: int) -> tuple[AgreementRow, list[Claim]]:
    """Measures and prints what ranks agree on."""
    say_progress(f"agreement of {num_ranks} ranks")
    row = agreement_row(num_ranks, num_buckets, measure_agreement(num_ranks, num_buckets))
    checked = check_agreement(row)
    say(
        "",
        f"Agreement of {num_ranks} ranks over a TCP store on the collectives of a program of {num_buckets} buckets "
        f"({row.contract_bytes:,} bytes),",
        f"medians and maxima of {REPEATS} programs and entries, of the slower rank; then a model trains on",
        "",
        *claim_table(checked),
    )
    return row, checked


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.overhead", description="what graphshard costs the host")
    parser.add_argument("--backend", choices=[*BACKENDS, "both"], default="both")
    parser.add_argument("--only", choices=["step", "agreement"], help="measure one of the two")
    parser.add_argument("--params", type=int, default=300, help="parameters of the model whose step is timed")
    parser.add_argument("--turns", type=int, default=60, help=f"of {STEPS_PER_TURN} steps, for each variant")
    parser.add_argument("--ranks", type=int, default=2, help="ranks that agree; 1: none do")
    parser.add_argument("--json", type=Path, help="writes machine, rows and claims to this file")
    parser.add_argument("--quick", action="store_true", help="small and soon over: shows that it works, no results")
    args = parser.parse_args()
    if args.quick:
        args.params, args.turns = 60, 4
        args.backend = "aot_eager" if args.backend == "both" else args.backend
    if args.turns < 1 or args.ranks < 1:
        parser.error("--turns and --ranks: want at least 1")
    if args.params < 2 * PARAMS_PER_BLOCK or args.params % PARAMS_PER_BLOCK:
        parser.error(f"--params: got {args.params}, want a multiple of {PARAMS_PER_BLOCK}, at least two")
    backends = list(BACKENDS) if args.backend == "both" else [args.backend]
    machine = Machine.this()
    say(*machine_lines(machine))
    if args.quick:
        say("NOTE: --quick measures too little for results")
    steps = measure_step_rows(backends, args.params, args.turns) if args.only in (None, "step") else []
    agreement, claims = None, list[Claim]()
    if args.only in (None, "agreement") and args.ranks > 1:
        agreement, claims = measure_agreement_row(args.ranks, 4 if args.quick else 126)
    if args.json is not None:
        written = {
            "machine": asdict(machine),
            "quick": args.quick,
            "verify_level": verify_level(),
            "step": [asdict(row) for row in steps],
            "agreement": agreement and asdict(agreement),
            "claims": [asdict(claim) for claim in claims],
        }
        args.json.write_text(json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
