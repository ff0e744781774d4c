"""A long run: `python -m bench.long [--steps N] [--backend B] [--json FILE]`.

Trains with evaluation, checkpoints, gathers by hand, changing batch sizes, engines and flags, and prints what each
process holds at twenty places. Exit status 1 if anything has grown since the first quarter.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, fields
from pathlib import Path

from bench.harness.machine import Machine, versions
from bench.harness.printing import say, say_progress
from bench.harness.tables import align, machine_lines
from bench.long.job import Sample, train
from graphshard.testing import pool, shutdown_pools

STEPS, SAMPLES, NUM_RANKS, WIDTH = 20_000, 20, 2, 16
# What may differ between two samples of a process that leaks nothing.
ALLOWED = {
    "rss_kib": 4096,  # of some 400 MiB: allocators keep what they have had, and place it otherwise
    "objects": 500,  # of some 500,000: caches of Python's own
    "tensors": 0,
    "threads": 0,
    "python_threads": 0,
    "files": 0,
    "programs": 0,
    "lines": 0,
    "store_keys": 4,  # what ranks are about to compare
}


def growth(samples: list[Sample]) -> dict[str, int]:
    """What has grown by more than is allowed, from the first quarter to the end, and by how much."""
    early = samples[: max(1, len(samples) // 4)][-1]
    found = {}
    for name, allowed in ALLOWED.items():
        grown = min(getattr(later, name) for later in samples[-3:]) - getattr(early, name)
        if grown > allowed:
            found[name] = grown
    return found


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="bench.long", description="what a long run holds on to")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"{STEPS}")
    parser.add_argument("--backend", default="aot_eager", help="aot_eager")
    parser.add_argument("--json", type=Path, help="also write the samples there")
    options = parser.parse_args()
    if options.steps < SAMPLES:
        parser.error(f"--steps: want at least {SAMPLES}")
    machine = Machine.this()
    say_progress(f"{options.steps} steps on {NUM_RANKS} ranks")
    every = options.steps // SAMPLES
    ranks = pool(NUM_RANKS).run(train, options.steps, every, options.backend, WIDTH, timeout_s=options.steps)
    shutdown_pools()
    say(*machine_lines(machine), f"{options.steps} steps, {options.backend}, {NUM_RANKS} gloo ranks; rank 0:", "")
    names = [field.name for field in fields(Sample)]
    say(*align(names, [[str(getattr(row, name)) for name in names] for row in ranks[0]]), "")
    grown = {rank: found for rank, samples in enumerate(ranks) if (found := growth(samples))}
    for rank, found in grown.items():
        say(f"rank {rank} has grown: " + ", ".join(f"{name} by {count}" for name, count in found.items()))
    if not grown:
        say(f"nothing grows behind the first quarter, by more than {ALLOWED}")
    if options.json:
        rows = [[asdict(row) for row in samples] for samples in ranks]
        options.json.write_text(json.dumps({"versions": versions(), "ranks": rows}, indent=1))
    return int(bool(grown))


if __name__ == "__main__":
    sys.exit(main())
