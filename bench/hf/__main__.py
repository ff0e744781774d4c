"""Classes of `transformers`, `diffusers` and `peft` under graphshard, beside eager:
`python -m bench.hf [MODEL ... | --every] [--as-shipped | --times | --memory]`.

Small random models, nothing is downloaded; fp32, no dropout, three steps of AdamW. Two comparisons for each: the plain
model under `torch.compile(backend="aot_eager")` with eager, in loss and gradients; and the same backend by
`graphshard.compile` with eager FSDP2 on 2 gloo ranks, in everything that `check_parity` compares. What is not bitwise
is told by its first difference. `breaks`, `regions`, `programs`: of the sharded model, over all steps; `outside`: how
many things its report names that ran in eager. Exit status 1: some model is bitwise unsharded, and not sharded.

A MODEL may be any class of `transformers` for text or images, too; with `--every`, all of them are compared, in two
hours. Their configurations are made small by the usual names of what they have, which some refuse.

With `--times`: seconds of the first step, and of steps, of eager FSDP2, FSDP2 with compiled units and graphshard with
Inductor and `plan="auto"`, in turns (`bench.hf.timed`). With `--memory`: what a step takes beside shards and optimizer
states, by torch's allocator, as a ratio to eager FSDP2's.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from importlib.util import find_spec

from bench.harness.machine import Machine
from bench.harness.printing import say, say_progress
from bench.harness.systems import BACKENDS, PLANS
from bench.harness.tables import align, machine_lines

NUM_RANKS = 2
TIMEOUT_S = 240.0
HEADER = ("model", "class", "unsharded", "sharded", "units", "breaks", "regions", "programs", "outside")


def main() -> int:
    """Compares and prints; returns the exit status."""
    if find_spec("transformers") is None:
        print("bench.hf: transformers is not installed: pip install transformers", file=sys.stderr)
        return 2
    from bench.hf.compared import Asked
    from bench.hf.models import CASES, DEEP
    from bench.hf.rows import compare
    from bench.hf.timed import TIMES_HEADER, measure_class, memory_of_class, times_cells, times_lines
    from bench.hf.unprepared import every_class, is_class

    names, deep = ([case.name for case in cases] for cases in (CASES, DEEP))
    parser = argparse.ArgumentParser(
        prog="bench.hf", description="models of transformers, diffusers and peft: are they bitwise?"
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help=f"a class, or some of {', '.join(names)}, which is the default, and of {', '.join(deep)}",
    )
    parser.add_argument("--every", action="store_true", help="all classes for text, and for sorting images")
    parser.add_argument("--plan", choices=PLANS, default="fsdp2", help="of graphshard.compile; fsdp2")
    parser.add_argument("--backend", choices=(*BACKENDS, "eager"), default="aot_eager", help="likewise; aot_eager")
    parser.add_argument("--as-shipped", action="store_true", help="as in defaults of the classes, and without padding")
    parser.add_argument("--times", action="store_true", help="steps, with inductor and plan auto")
    parser.add_argument("--memory", action="store_true", help="memory of steps, likewise")
    parser.add_argument("--details", action="store_true", help="print errors whole, and reports")
    options = parser.parse_args()
    if unknown := [name for name in options.models if name not in {*names, *deep} and not is_class(name)]:
        parser.error(
            f"no such model: {', '.join(unknown)}; there are {', '.join([*names, *deep])}, and classes of transformers"
        )
    if options.every and options.models:
        parser.error(f"--every takes all: got {', '.join(options.models)} too")
    chosen = every_class() if options.every else options.models or names
    machine = Machine.this()
    asked = [Asked(name, "auto", "inductor", options.as_shipped) for name in chosen]
    if options.memory:
        ratios = [(one.name, memory_of_class(one, NUM_RANKS)) for one in asked]
        say(
            *machine_lines(machine),
            *align(("model", "memory"), [(name, f"{ratio:.2f}" if ratio else "failed") for name, ratio in ratios]),
        )
        return 0
    if options.times:
        times = {one.name: measure_class(one, NUM_RANKS) for one in asked}
        cells = [times_cells(name, of) for name, of in times.items()]
        say(*machine_lines(machine), *align(TIMES_HEADER, cells), *times_lines(times))
        return 0
    rows = []
    for name in chosen:
        say_progress(name)
        one = Asked(name, options.plan, options.backend, options.as_shipped)
        rows.append(row := compare(one, NUM_RANKS, TIMEOUT_S))
        say_progress("  ".join(row.cells()))  # a run of all takes hours, and may be ended before its table
    say(
        f"torch {machine.torch_version}, transformers {version('transformers')}, Python {machine.python_version}; "
        f"{NUM_RANKS} gloo ranks, backend {options.backend}, plan {options.plan}",
        *align(HEADER, [row.cells() for row in rows]),
        *(line for row in rows for line in row.lines(details=options.details)),
    )
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
