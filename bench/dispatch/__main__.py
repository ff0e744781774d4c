"""Cost of choosing programs: `python -m bench.dispatch [--quick] [--json FILE]`.

Prints what it takes, in every step, to choose the programs that flags and held tensors ask for, and what it takes to
flip a flag: the first time, when a program is lowered, and later. The exit status is 0 whatever the numbers are; a call
that fell back to eager FSDP2 is an error.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from bench.dispatch.rows import DispatchRow, FlipRow, dispatch_row, flip_row
from bench.dispatch.tables import dispatch_table, flip_table
from bench.dispatch.timer import CASES, FLIPPED, DispatchTimer
from bench.harness.machine import Machine
from bench.harness.models import PARAMS_PER_BLOCK
from bench.harness.printing import say, say_progress
from bench.harness.processes import Ranks
from bench.harness.tables import machine_lines
from graphshard.env import verify_level

TIMEOUT_S = 600.0
BLOCKS_PER_UNIT = 2


def measure(backend: str, num_params: int, steps: int) -> tuple[list[DispatchRow], list[FlipRow]]:
    """All rows. One process for the first flips of all flags: each meets a program that it does not know."""
    with Ranks(
        f"dispatch, {backend}", 1, DispatchTimer, backend, num_params, BLOCKS_PER_UNIT, timeout_s=TIMEOUT_S
    ) as one:
        flips = []
        for flag in FLIPPED:
            say_progress(f"flips: {flag}")
            (first,) = one.call("first_flip", flag)
            ((flipped, still),) = one.call("later_flips", flag, steps)
            flips.append(flip_row(flag, first, flipped, still))
        rows = []
        for case in CASES:
            say_progress(f"steps: {case}")
            rows.append(dispatch_row(case, one.call("case", case, steps)[0]))
    return rows, flips


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.dispatch", description="what choosing programs costs")
    parser.add_argument("--backend", choices=["aot_eager", "inductor"], default="aot_eager")
    parser.add_argument("--params", type=int, default=300, help="parameters of the model")
    parser.add_argument("--steps", type=int, default=200, help="of each case")
    parser.add_argument("--json", type=Path, help="writes machine and rows to this file")
    parser.add_argument("--quick", action="store_true", help="small and soon over: shows that it works, no results")
    args = parser.parse_args()
    per_unit = PARAMS_PER_BLOCK * BLOCKS_PER_UNIT
    if args.quick:
        args.params, args.steps = 5 * per_unit, 10
    if args.steps < 2:
        parser.error("--steps: want at least 2")
    if args.params < 2 * per_unit or args.params % per_unit:
        parser.error(f"--params: got {args.params}, want a multiple of {per_unit}, at least two")
    machine = Machine.this()
    say(*machine_lines(machine))
    if args.quick:
        say("NOTE: --quick measures too little for results")
    rows, flips = measure(args.backend, args.params, args.steps)
    say(
        "",
        f"Choosing the programs of a training step (one forward, one backward): {args.params} small parameters, "
        f"{args.params // per_unit} units, {args.backend}",
        "world size 1 (gloo, HashStore), param_dtype bfloat16: a gather is a cast. One process, 1 thread, garbage",
        f"collector off; medians of {args.steps} steps, timed inside them. bind: the shards behind the arguments;",
        "states: what they hold and what flags ask; look-up: key and dictionary",
        "",
        *dispatch_table(rows),
        "",
        "Setting a flag and setting it back",
        "lowered, captured: programs and graphs of Dynamo's, the first time; first: what these two steps took beyond",
        f"ordinary ones; lowering: of that, passes and their checks (GRAPHSHARD_VERIFY={verify_level()}); later:",
        "choosing programs in a step behind a flip, once all are there, and without a flip; set: FSDP2's own method",
        "",
        *flip_table(flips),
    )
    if args.json is not None:
        written = {
            "machine": asdict(machine),
            "quick": args.quick,
            "verify_level": verify_level(),
            "dispatch": [asdict(row) for row in rows],
            "flips": [asdict(row) for row in flips],
        }
        args.json.write_text(json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
