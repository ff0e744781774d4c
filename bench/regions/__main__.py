"""What `regions="unit"` saves and costs on equal blocks: `python -m bench.regions [--width N] [--runs N] [--rounds N]`.

Prints the first step, compilation included, of a decoder of many equal blocks beside that of few, and its later steps
beside those of the whole graph, on 2 gloo ranks. The exit status is 0 whatever the numbers are.
"""

from __future__ import annotations

import argparse

from bench.harness.machine import Machine
from bench.harness.printing import say, say_progress
from bench.harness.systems import System
from bench.harness.tables import align, machine_lines
from bench.step.models import FEW_BLOCKS, MANY_BLOCKS, WIDTHS
from bench.step.rows import check_row, check_training, training_rows
from bench.step.training import train

NUM_RANKS = 2
RUNS, ROUNDS = 5, 6
WHOLE = (System("graphshard", "inductor", "fsdp2"), System("graphshard", "inductor", "auto"))
PER_UNIT = tuple(System("graphshard", "inductor", system.plan, "unit") for system in WHOLE)
HEADER = ("plan", "regions", "first step s", "to few blocks", "step ms", "quartiles ms", "to whole, same plan")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="bench.regions", description="equal blocks as regions of their own")
    parser.add_argument("--width", type=int, choices=WIDTHS, default=WIDTHS[0], help=f"of the blocks; {WIDTHS[0]}")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"steps of each turn; {RUNS}")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"turns of each system; {ROUNDS}")
    options = parser.parse_args()
    if min(options.runs, options.rounds) < 1 or options.runs * options.rounds < 2:
        parser.error("--runs, --rounds: want at least 1 of each and 2 steps, for quartiles")
    machine = Machine.this()
    compared = (*WHOLE, *PER_UNIT)
    few_blocks, many_blocks = (f"d{options.width}_L{number}" for number in (FEW_BLOCKS, MANY_BLOCKS))
    few = train(few_blocks, compared, NUM_RANKS, 1, 1, say_progress)
    many = train(many_blocks, compared, NUM_RANKS, options.runs, options.rounds, say_progress)
    want_norms = many[compared[0]].first[0].grad_norms
    check_training([check_row(many_blocks, system, m.first, m.turns, want_norms) for system, m in many.items()])
    rows = training_rows(
        many_blocks,
        {system: m.first for system, m in many.items()},
        {system: m.turns for system, m in many.items()},
    )
    whole_ms = {system.plan: row.step_ms for system, row in zip(compared, rows, strict=True) if system in WHOLE}
    table = []
    for system, row in zip(compared, rows, strict=True):
        few_s = max(first.first_step_s for first in few[system].first)
        table.append(
            (
                system.plan or "",
                system.regions,
                f"{row.compile_s:.1f}",
                f"{row.compile_s / few_s:.2f}",
                f"{row.step_ms:.1f}",
                f"{row.low_ms:.1f} - {row.high_ms:.1f}",
                f"{row.step_ms / whole_ms[system.plan]:.3f}",
            )
        )
    steps = options.runs * options.rounds
    say(*machine_lines(machine), f"{many_blocks}, beside {few_blocks}: {NUM_RANKS} ranks, {steps} steps of each")
    say(*align(HEADER, table))


if __name__ == "__main__":
    main()
