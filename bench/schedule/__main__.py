"""Schedules on paper: `python -m bench.schedule [--cases M ...] [--worlds N ...] [--hardware H] [--json FILE]`.

Every system gets the same graphs, the same cost model, the same simulator and the same count of memory; nothing is run.
Prints, for each program, what its schedule takes over a time that no schedule can beat. The exit status is 0 whatever
the numbers are. Most of the time is torch's own pass, which works on graphs of the whole depth: without `torch_overlap`
in `--systems` the whole grid takes minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import graphshard
from bench.harness.machine import Machine, versions
from bench.harness.printing import say, say_progress
from bench.schedule.cases import MODELS, QUICK, Case, CaseModel, make_case, trace_model
from bench.schedule.rows import OURS, SYSTEMS, TORCH, ScheduleRow, case_rows, schedule_table, summary_lines
from bench.schedule.torch_overlap import refusal
from graphshard.cost import Hardware, find_hardware
from graphshard.cost.model import FORMULAS

WORLDS, QUICK_WORLDS = (8, 64, 512), (8,)
BUDGET_GB = 80.0
MIN_RANKS = 2


@dataclass(frozen=True)
class ScheduleOptions:
    """What is asked for.

    Attributes:
        budget_gb: of a rank, states included, in 10^9 bytes; the other budget is what FSDP2's schedules allocate.
    """

    models: tuple[CaseModel, ...]
    worlds: tuple[int, ...]
    systems: tuple[str, ...]
    hardware: Hardware
    budget_gb: float
    quick: bool
    json: Path | None


def parse_options(argv: Sequence[str] | None = None) -> ScheduleOptions:
    """Reads the command line; leaves the program, with a line that says why, if it asks for something impossible."""
    parser = argparse.ArgumentParser(prog="bench.schedule", description="schedules on paper against those of others")
    models = {**MODELS, QUICK.name: QUICK}
    parser.add_argument(
        "--cases", nargs="+", choices=[*models], metavar="M", help=f"of {', '.join(models)}; all of use"
    )
    parser.add_argument("--worlds", nargs="+", type=int, metavar="N", help=f"numbers of ranks; {WORLDS}")
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, default=[*SYSTEMS], metavar="S", help=f"of {', '.join(SYSTEMS)}; all"
    )
    parser.add_argument("--hardware", default="h100", help="a row of the hardware table, or a calibration file; h100")
    parser.add_argument("--budget", type=float, default=BUDGET_GB, metavar="GB", help=f"of a rank; {BUDGET_GB:g}")
    parser.add_argument("--json", type=Path, help="writes versions, machine and rows to this file")
    parser.add_argument("--quick", action="store_true", help="one tiny model: shows that it works, no results")
    args = parser.parse_args(argv)
    worlds = args.worlds or (QUICK_WORLDS if args.quick else WORLDS)
    if min(worlds) < MIN_RANKS:
        parser.error(f"--worlds: got {min(worlds)}, want at least {MIN_RANKS} ranks")
    if not args.budget > 0:
        parser.error(f"--budget: got {args.budget}, want GB, above 0")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        parser.error(f"--json: got {args.json}, want a file in a folder that is there")
    try:
        hardware = find_hardware(args.hardware)
    except (OSError, ValueError) as error:
        parser.error(f"--hardware: {error}")
    names = args.cases or ([QUICK.name] if args.quick else [*MODELS])
    return ScheduleOptions(
        tuple(models[name] for name in dict.fromkeys(names)),
        tuple(dict.fromkeys(worlds)),
        tuple(system for system in SYSTEMS if system in args.systems),
        hardware,
        args.budget,
        args.quick,
        args.json,
    )


def budgets_of(case: Case, budget_gb: float) -> dict[str, int]:
    """Bytes that each program of a case may allocate, by the name of the budget."""
    return {"fsdp2": case.fsdp2_bytes(), f"{budget_gb:g}gb": int(budget_gb * 1e9) - case.states_bytes}


def json_text(machine: Machine, options: ScheduleOptions, rows: Sequence[ScheduleRow], load: float) -> str:
    """What `--json` writes."""
    written = {
        "versions": {**versions(), "cost_formulas": FORMULAS},
        "machine": {**asdict(machine), "load_after": load, "planned_for": options.hardware.name},
        "rows": [asdict(row) for row in rows],
    }
    return json.dumps(written, indent=1) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    machine = Machine.this()
    say(f"torch {torch.__version__}, graphshard {graphshard.__version__}, hardware {options.hardware.name}")
    if options.quick:
        say("NOTE: --quick plans a model that nobody trains: no results")
    if TORCH in options.systems and (reason := refusal()) is not None:
        say(f"NOTE: {TORCH} has no schedules: {reason}")
    say(
        "",
        "Schedules of one microbatch of one sequence a rank, simulated; bf16 gathers, fp32 states and reductions",
        "/ bound: time over a time that no schedule can beat; exposed: the computation waits; peak: most that is",
        f"allocated, without the optimizer's moments; budgets: fsdp2, what FSDP2's schedules allocate, and "
        f"{options.budget_gb:g}gb,",
        f"{options.budget_gb:g} GB less the moments; only {OURS} plans within the budget, others may be over it",
    )
    rows: list[ScheduleRow] = []
    for model in options.models:
        say_progress(f"{model.name}: tracing")
        traced = trace_model(model, options.hardware)
        for world_size in options.worlds:
            case = make_case(traced, world_size)
            say_progress(f"{case.name}: {', '.join(options.systems)}")
            found = case_rows(case, budgets_of(case, options.budget_gb), options.systems)
            say("", f"{model.name}, {model.preset.layers} blocks, {model.preset.tokens} tokens, {world_size} ranks", "")
            say(*schedule_table(found))
            rows += found
    say("", *summary_lines(rows))
    if options.json is not None:
        options.json.write_text(json_text(machine, options, rows, os.getloadavg()[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
