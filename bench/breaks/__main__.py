"""What a graph break in each block costs: `python -m bench.breaks [--blocks N] [--width N] [--backend B]`.

Steps of a decoder of many blocks with a break in each, beside those without, sharded by graphshard on 2 gloo ranks; and
what the breaks alone cost `torch.compile` of the same model, unsharded, in the same processes. The last number is the
step with breaks, over that without plus what they cost unsharded.
"""

from __future__ import annotations

import argparse
import statistics

from bench.breaks.job import NAMES, measure
from bench.harness.machine import Machine
from bench.harness.printing import say, say_progress
from bench.harness.tables import align, machine_lines
from graphshard.testing import pool, shutdown_pools

NUM_RANKS = 2


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="bench.breaks", description="a graph break in each block")
    parser.add_argument("--blocks", type=int, default=24, help="24")
    parser.add_argument("--width", type=int, default=128, help="128")
    parser.add_argument("--steps", type=int, default=5, help="of each turn; 5")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each; 6")
    parser.add_argument("--backend", default="inductor", help="inductor")
    options = parser.parse_args()
    machine = Machine.this()
    say_progress(f"{options.blocks} blocks of width {options.width}, {options.backend}")
    arguments = (options.blocks, options.width, options.steps, options.rounds, options.backend)
    ranks = pool(NUM_RANKS).run(measure, *arguments, timeout_s=3600)
    shutdown_pools()
    slower = [[max(both) for both in zip(*times, strict=True)] for times in zip(*ranks, strict=True)]
    medians = [statistics.median(times) * 1e3 for times in slower]
    rows = []
    for name, median, times in zip(NAMES, medians, slower, strict=True):
        low, _, high = statistics.quantiles(times, n=4)
        rows.append((name, options.backend, f"{median:.1f}", f"{low * 1e3:.1f} - {high * 1e3:.1f}"))
    say(*machine_lines(machine), f"{options.blocks} blocks of width {options.width}, {NUM_RANKS} gloo ranks, AdamW", "")
    say(*align(("system", "backend", "step ms", "quartiles ms"), rows), "")
    plain, plain_broken, whole, broken = medians
    say(f"breaks cost {plain_broken - plain:.1f} ms unsharded, {broken - whole:.1f} ms sharded")
    say(f"step with breaks to that without and what they cost unsharded: {broken / (whole + plain_broken - plain):.3f}")


if __name__ == "__main__":
    main()
