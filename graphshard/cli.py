"""The command line: models, plan files and hardware, read without a GPU or a process group.

    graphshard plan show FILE              buckets, launches, waits and predictions of each program
    graphshard plan diff A B               what differs; exit status 1 if anything does
    graphshard plan check FILE             whether the file contradicts itself
    graphshard plan --model M              plans a model (see `graphshard plan --model M --help`)
    graphshard hardware [NAME]             the hardware table and its sources
    graphshard doctor MODULE:FUNCTION      what of a model is handled specially, runs in eager, or is refused
    graphshard diagnose DIR                what happened when a rank hung or died, from the dumps of the ranks
    graphshard --version                   graphshard's version, and those of what it runs on

Exit status: 0, 1 (plans differ, or something of a model is refused), 2 (wrong arguments or files).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch

from graphshard.cost import HARDWARE, find_hardware
from graphshard.cost.hardware_file import hardware_fields
from graphshard.examining.command import add_arguments
from graphshard.faults import diagnose
from graphshard.graph.plan import END
from graphshard.plan_file import Plan, StoredProgram, load_plan, plan_changes
from graphshard.reporting.table_text import write_table
from graphshard.version import __version__

# Plans a model by its arguments.
_SCALE = "graphshard.scale.command"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        first = arguments[1] if arguments[:1] == ["plan"] and arguments[1:] else ""
        if first.startswith("-") and first not in ("-h", "--help"):
            status = _plan_model(arguments[1:])
        else:
            options = _parser().parse_args(arguments)
            status = cast(int, options.run(options))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `| head` has read enough; what is buffered goes nowhere, without a word at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError) as error:
        sys.stderr.write(f"graphshard: {error}\n")
        return 2
    except SystemExit as error:  # of argparse, which has said why
        return error.code if isinstance(error.code, int) else 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "graphshard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=_version(), help="print versions and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    text = (
        "read, compare and check plan files, or plan a model: --model, a name or MODULE:FUNCTION, "
        "whose other arguments `graphshard plan --model M --help` lists"
    )
    plan = commands.add_parser("plan", help=text, description=text)
    parts = plan.add_subparsers(required=True, metavar="COMMAND")
    for name, (run, text, files) in _PLAN_COMMANDS.items():
        part = parts.add_parser(name, help=text, description=text)
        for file in files:
            part.add_argument(file, metavar=file.upper(), help="a plan file")
        part.set_defaults(run=run)
    hardware = commands.add_parser("hardware", help="print the hardware table")
    hardware.add_argument("name", nargs="?", help="one row, or a calibration file, with the source of each number")
    hardware.set_defaults(run=_hardware)
    text = "say what of a model is handled specially, runs in eager, has no effect, or is refused, and what to do"
    add_arguments(commands.add_parser("doctor", help=text, description=text))
    text = "say what happened when a rank hung or died, from the dumps in a folder (GRAPHSHARD_FAULTS)"
    diagnosed = commands.add_parser("diagnose", help=text, description=text)
    diagnosed.add_argument("folder", metavar="DIR", help="a folder of dumps, of all ranks if they can be put together")
    diagnosed.set_defaults(run=_diagnose)
    return parser


def _version() -> str:
    return f"graphshard {__version__} (torch {torch.__version__}, Python {platform.python_version()})"


def _show(options: argparse.Namespace) -> int:
    plan = load_plan(options.file)
    sys.stdout.write(f"{options.file}: {_described(plan)}\n")
    for program in plan.programs:
        sys.stdout.write(f"\n{_summary(program)}")
        if program.kept is not None:
            sys.stdout.write(f"  stay gathered: {', '.join(unit or 'root' for unit in program.kept) or 'none'}\n")
        columns = ("bucket", ">parameters", ">bytes", "launch", "wait", "finish")
        write_table(sys.stdout, columns, _rows(program))
    return 0


def _described(plan: Plan) -> str:
    budget = "FSDP2's memory" if plan.budget_bytes is None else f"{plan.budget_bytes:,} bytes"
    return (
        f"mode {plan.mode}, at most {budget}, for {plan.hardware.name} ({plan.hardware.fingerprint}); "
        f"graphshard {plan.graphshard}, torch {plan.torch}; programs: {len(plan.programs)}"
    )


def _summary(program: StoredProgram) -> str:
    predicted = program.predicted
    return (
        f"{program.name}: {program.chosen}, outline {program.outline_hash}\n"
        f"  {predicted.step_us:,.1f} us, of which {predicted.exposed_us:,.1f} us exposed; at least "
        f"{predicted.lower_bound_us:,.1f} us; {predicted.peak_bytes:,} of {program.budget_bytes:,} bytes\n"
    )


def _rows(program: StoredProgram) -> list[list[str]]:
    wire_bytes = {(member.kind, member.fqn): member.wire_bytes for member in program.outline.members}
    place = {
        (step.bucket, step.step): "end" if step.before == END else f"{step.position} {step.before}"
        for step in program.steps
    }
    return [
        [
            bucket.name,
            str(len(bucket.members)),
            f"{sum(wire_bytes[bucket.kind, fqn] for fqn in bucket.members):,}",
            *(place.get((bucket.name, step), "") for step in ("launch", "wait", "finish")),
        ]
        for bucket in program.buckets
    ]


def _diff(options: argparse.Namespace) -> int:
    sides = (f"in {options.a}", f"in {options.b}")
    changes = plan_changes(load_plan(options.a), load_plan(options.b), sides)
    sys.stdout.write("".join(f"{line}\n" for line in changes))
    return 1 if changes else 0


def _check(options: argparse.Namespace) -> int:
    plan = load_plan(options.file)
    sys.stdout.write(
        f"{options.file}: sound; programs: {len(plan.programs)}. Whether it fits a model says "
        "graphshard.compile(model, plan=FILE)\n"
    )
    return 0


def _diagnose(options: argparse.Namespace) -> int:
    diagnose(Path(options.folder), sys.stdout)
    return 0


def _plan_model(arguments: list[str]) -> int:
    scale = importlib.import_module(_SCALE)
    parser = argparse.ArgumentParser("graphshard plan")
    scale.add_arguments(parser)
    return int(scale.run(parser.parse_args(arguments)) or 0)


def _hardware(options: argparse.Namespace) -> int:
    if options.name is None:
        columns = ("name", ">bf16 TFLOP/s", ">memory GB/s", ">memory GiB", ">link GB/s", ">network GB/s", ">ranks/node")
        rows = [
            [
                row.name,
                f"{row.matmul_tflops['bfloat16']:g}",
                f"{row.memory_gb_s:g}",
                f"{row.memory_bytes / 2**30:g}",
                f"{row.link_gb_s:g}",
                f"{row.network_gb_s:g}",
                str(row.ranks_per_node),
            ]
            for row in HARDWARE.values()
        ]
        write_table(sys.stdout, columns, rows)
        sys.stdout.write("`graphshard hardware NAME` says every number and where it is from\n")
        return 0
    row = find_hardware(options.name)
    sys.stdout.write(f"{row.name}\n")
    for name, value in hardware_fields(row).items():
        if name not in ("name", "sources"):
            sys.stdout.write(f"  {name}: {json.dumps(value)}\n    {row.sources.get(name, 'no source')}\n")
    return 0


_PLAN_COMMANDS = {
    "show": (_show, "prints a plan file", ("file",)),
    "diff": (_diff, "says what differs between two plan files", ("a", "b")),
    "check": (_check, "says whether a plan file contradicts itself", ("file",)),
}
