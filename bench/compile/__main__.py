"""The first training step by phase: `python -m bench.compile [--quick] [--blocks N ...] [--picture FILE.svg]`.

Prints where the seconds of the first step go on 2 gloo ranks, against FSDP2 with compiled blocks and DDP, on an empty
cache and on a warm one, and how they grow with depth. The exit status is 0 whatever the numbers are; a system that
computes something else, or that fell back, is an error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec

import graphshard
from bench.compile.claims import check_claims
from bench.compile.fake_cuda import HARDWARE_ROW, MODEL, TINY, FakeRow, fake_row
from bench.compile.first_step import BATCH_SIZE, DIM, SEQ_LEN, measure_first_steps
from bench.compile.options import QUICK_BLOCKS, CompileOptions, parse_options
from bench.compile.phases import ALL_PHASES
from bench.compile.picture import TITLE, bars_of
from bench.compile.rows import CompileRow, GrowthRow, check_losses, compile_rows, growth_rows
from bench.compile.tables import compile_table, fake_table, growth_table
from bench.harness.bars import print_bars, write_svg
from bench.harness.claims import Claim
from bench.harness.disturbance import disturbed_lines
from bench.harness.machine import Machine, versions
from bench.harness.printing import say, say_progress
from bench.harness.tables import claim_table, load_lines, machine_lines
from graphshard.env import verify_level
from graphshard.scale.presets import PRESETS
from graphshard.scale.trace import TRACED_SHARDS

NUM_RANKS = 2


def measure(blocks: int, options: CompileOptions) -> list[CompileRow]:
    """Measures one depth, and checks that all systems computed the same."""
    cases = {}
    for system in options.compared:  # not at the same time: seconds are the result
        say_progress(f"{blocks} blocks: {system}")
        cases[system] = measure_first_steps(system, blocks, NUM_RANKS, options.warm)
    check_losses(blocks, cases)
    return compile_rows(blocks, cases)


def measure_rows(options: CompileOptions, machine: Machine) -> tuple[list[CompileRow], list[GrowthRow], list[Claim]]:
    """Measures and prints first steps."""
    say(
        "",
        f"First training step (forward, backward) of float32 decoders, {DIM} wide, {BATCH_SIZE} x {SEQ_LEN} bytes a "
        f"rank, on {NUM_RANKS} gloo ranks",
        "Fresh processes for each case, 1 thread and 1 compile thread a rank, an unrelated function compiled before.",
        "cold: an empty Inductor cache, which the ranks share; warm: fresh processes on what cold ones left there. The",
        "slower rank's seconds; ratio: to fsdp2+compile, as deep; to cold: of a warm step; phases have nothing in",
        "common and are the whole step; kernel compiler: waiting for it, too; passes: graphshard's, and their checks",
        f"(GRAPHSHARD_VERIFY={verify_level()}); graphs: given to Inductor; kernels: different C++ sources compiled",
    )
    rows: list[CompileRow] = []
    for blocks in options.blocks:
        measured = measure(blocks, options)
        say("", *compile_table(measured))
        rows += measured
    growth = growth_rows(rows)
    claims = check_claims(rows)
    say("", *growth_table(growth), "", *claim_table(claims), "")
    say(*load_lines(machine, os.getloadavg()[0], NUM_RANKS), *disturbed_lines(row.disturbed for row in rows), "")
    if find_spec("rich") is not None:
        print_bars(ALL_PHASES, bars_of(rows))
    if options.picture is not None:
        write_svg(options.picture, TITLE, ALL_PHASES, bars_of(rows))
    return rows, growth, claims


def measure_fake_rows(options: CompileOptions) -> list[FakeRow]:
    """Traces and lowers, and prints what that took."""
    rows = []
    fake_row(QUICK_BLOCKS[0], TINY)  # what is done once in a process: imports, patterns of Inductor's passes
    for blocks in options.blocks:
        say_progress(f"Llama 3 8B, {blocks} blocks")
        rows.append(fake_row(blocks))
    say(
        "",
        f"{MODEL}, {PRESETS[MODEL].tokens} tokens, traced for {TRACED_SHARDS} shards and lowered as for GPUs "
        f"({HARDWARE_ROW}, plan auto), on tensors",
        "without data whose device is the CPU; nothing is compiled or run. Forward and backward together; seconds",
        "",
        *fake_table(rows),
    )
    return rows


def json_text(
    machine: Machine,
    options: CompileOptions,
    rows: Sequence[CompileRow],
    growth: Sequence[GrowthRow],
    claims: Sequence[Claim],
    fake: Sequence[FakeRow],
) -> str:
    """What `--json` writes."""
    written = {
        "versions": versions(),
        "machine": {**asdict(machine), "load_after": os.getloadavg()[0]},
        "rows": [asdict(row) for row in rows],
        "growth": [asdict(row) for row in growth],
        "claims": [asdict(claim) for claim in claims],
        "fake_cuda": [asdict(row) for row in fake],
        "quick": options.quick,
        "ranks": NUM_RANKS,
        "verify_level": verify_level(),
    }
    return json.dumps(written, indent=1) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    machine = Machine.this()
    say(*machine_lines(machine), f"graphshard {graphshard.__version__}")
    if options.quick:
        say("NOTE: --quick measures too little for results")
    rows: list[CompileRow] = []
    growth: list[GrowthRow] = []
    claims: list[Claim] = []
    fake: list[FakeRow] = []
    if options.fake_cuda:
        fake = measure_fake_rows(options)
    else:
        rows, growth, claims = measure_rows(options, machine)
    if options.json is not None:
        options.json.write_text(json_text(machine, options, rows, growth, claims, fake))
    return 0


if __name__ == "__main__":
    sys.exit(main())
