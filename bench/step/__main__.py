"""Training steps against FSDP2's and DDP's: `python -m bench.step [--quick] [--models M ...] [--json FILE]`.

Prints what a whole step takes on 2 gloo ranks, the memory it needs and the seconds of the first one. The exit status is
0 whatever the numbers are; a system that trains otherwise than the first, or that fell back, is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import graphshard
from bench.harness.machine import Machine, versions
from bench.harness.printing import say, say_progress
from bench.harness.systems import ALL_NAMES, BACKENDS, PLANS, SYSTEM_NAMES, System, refusal, systems
from bench.harness.tables import machine_lines
from bench.step.models import TRAINED
from bench.step.rows import CheckRow, TrainingRow, check_row, check_training, training_rows
from bench.step.tables import checks_line, noise_lines, training_table
from bench.step.training import train
from graphshard.env import verify_level

NUM_RANKS = 2
RUNS, ROUNDS = 5, 8
QUICK_MODELS, QUICK_RUNS, QUICK_ROUNDS = ("d128_L12",), 3, 2
MIN_STEPS = 2


@dataclass(frozen=True)
class StepOptions:
    """What is asked for.

    Attributes:
        compared: systems whose ratios are printed side by side.
        runs: timed steps in each turn of a system.
        rounds: turns of each system.
        skipped: a line for each thing that was asked for and cannot be measured.
    """

    models: tuple[str, ...]
    compared: tuple[System, ...]
    runs: int
    rounds: int
    quick: bool
    json: Path | None
    skipped: tuple[str, ...]


def parse_options(argv: Sequence[str] | None = None) -> StepOptions:
    """Reads the command line; leaves the program, with a line that says why, if it asks for something impossible."""
    parser = argparse.ArgumentParser(prog="bench.step", description="training steps against FSDP2's and DDP's")
    parser.add_argument("--models", nargs="+", choices=[*TRAINED], metavar="M", help=f"of {', '.join(TRAINED)}; all")
    parser.add_argument(
        "--systems", nargs="+", choices=ALL_NAMES, default=[*SYSTEM_NAMES], metavar="S",
        help=f"of {', '.join(ALL_NAMES)}; the first {len(SYSTEM_NAMES)}",
    )  # fmt: skip
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=[*BACKENDS], help="of graphshard; both")
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=[*PLANS], help="of graphshard; both")
    parser.add_argument("--runs", type=int, help=f"steps that a system times in each turn; {RUNS}")
    parser.add_argument("--rounds", type=int, help=f"turns of each system; {ROUNDS}")
    parser.add_argument("--json", type=Path, help="writes versions, machine and rows to this file")
    parser.add_argument("--quick", action="store_true", help="one model, few steps: shows that it works, no results")
    args = parser.parse_args(argv)
    runs = args.runs if args.runs is not None else QUICK_RUNS if args.quick else RUNS
    rounds = args.rounds if args.rounds is not None else QUICK_ROUNDS if args.quick else ROUNDS
    models = args.models or (QUICK_MODELS if args.quick else TRAINED)
    for name, number in (("--runs", runs), ("--rounds", rounds)):
        if number < 1:
            parser.error(f"{name}: got {number}, want at least 1")
    if runs * rounds < MIN_STEPS:
        parser.error(f"--runs, --rounds: got {runs} step of each system, want at least {MIN_STEPS} for quartiles")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        parser.error(f"--json: got {args.json}, want a file in a folder that is there")
    refused = {plan: why for plan in args.plans if (why := refusal(plan)) is not None}
    compared = systems(args.systems, args.backends, [plan for plan in args.plans if plan not in refused])
    skipped = tuple(refused.values()) if "graphshard" in args.systems else ()
    if not compared:
        parser.error(f"--systems, --plans: got nothing to measure, want at least one system; {'; '.join(skipped)}")
    return StepOptions(tuple(dict.fromkeys(models)), tuple(compared), runs, rounds, args.quick, args.json, skipped)


def measure(model: str, options: StepOptions) -> tuple[list[TrainingRow], list[CheckRow]]:
    """Trains one model with every system, and checks that all did the same."""
    measured = train(model, options.compared, NUM_RANKS, options.runs, options.rounds, say_progress)
    want_norms = measured[options.compared[0]].first[0].grad_norms
    checks = [check_row(model, system, m.first, m.turns, want_norms) for system, m in measured.items()]
    check_training(checks)
    rows = training_rows(
        model,
        {system: m.first for system, m in measured.items()},
        {system: m.turns for system, m in measured.items()},
    )
    return rows, checks


def json_text(
    machine: Machine, options: StepOptions, rows: Sequence[TrainingRow], checks: Sequence[CheckRow], load: float
) -> str:
    """What `--json` writes."""
    written = {
        "versions": versions(),
        "machine": {**asdict(machine), "load_after": load},
        "rows": [asdict(row) for row in rows],
        "checks": [asdict(row) for row in checks],
        "quick": options.quick,
        "ranks": NUM_RANKS,
        "skipped": options.skipped,
        "verify_level": verify_level(),
    }
    return json.dumps(written, indent=1) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    machine = Machine.this()
    say(*machine_lines(machine), f"graphshard {graphshard.__version__}")
    if options.quick:
        say("NOTE: --quick measures too little for results")
    say(*(f"NOTE: {line}" for line in options.skipped))
    say(
        "",
        f"Training steps (forward, backward, fused AdamW, zero_grad) of float32 decoders on {NUM_RANKS} gloo ranks",
        "Fresh processes and Inductor caches for each system, 1 thread a rank, garbage collector off; the systems take",
        f"turns, {options.rounds} of {options.runs} steps; medians of the slower rank; ratio: to the faster of fsdp2",
        "and fsdp2+compile, whose blocks are compiled; target: graphshard's, and whether it is met; peak: most that is",
        "resident on a rank during steps, code and compilers included; idle: the same between turns; compile: seconds",
        f"of the first step, compilation included (GRAPHSHARD_VERIFY={verify_level()}); ahead from step: the first one",
        "included, no more time than either of those two; collectives: of one step",
    )
    rows: list[TrainingRow] = []
    checks: list[CheckRow] = []
    for model in options.models:
        measured = measure(model, options)
        sizes = TRAINED[model]
        say("", f"{model}: {sizes.batch_size} x {sizes.config.max_seq_len} bytes a rank", "")
        say(*training_table(*measured), checks_line(measured[1]))
        rows += measured[0]
        checks += measured[1]
    load = os.getloadavg()[0]
    say("", *noise_lines(rows, checks, machine, load, NUM_RANKS))
    if options.json is not None:
        options.json.write_text(json_text(machine, options, rows, checks, load))
    return 0


if __name__ == "__main__":
    sys.exit(main())
