"""What becomes of a job in which something goes wrong on one rank: `python -m bench.faults`.

    python -m bench.faults [--faults NAME ...] [--ranks 2 4] [--times N] [--deadline S] [--json FILE] [--quick]

Each job is a tiny model trained for a few steps, by fresh processes on CPU over gloo. One that goes on to its end is
right if all losses and parameters are bitwise those of eager FSDP2 with the same fault, or, where eager FSDP2 would
hang but need not, those of the model without shards, within 1e-5. A fault is detected if every live rank ends with an
error, one of which names the rank, unit or parameter. Seconds are from the injection until the last live rank has
ended. A job of which a live rank runs on beyond the deadline is a hang. The exit status is 1 if any job was neither
right nor detected.

A crash ends ranks of the demo's trainer, of 8 steps with a checkpoint after every second one, under torchrun, which
starts them again. It is right if the job goes on from the newest checkpoint that was complete, and all losses, gradient
norms and the last checkpoint are bitwise those of the job without the crash; in another number of ranks, if losses are
within 1e-5. Seconds are until the job has ended.

A collective is dropped, delayed, duplicated or put behind the next one by a process group around gloo's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.faults.catalog import FAULTS
from bench.faults.crash_runner import CrashRow, CrashRunner
from bench.faults.crashes import CRASHES
from bench.faults.outcomes import GOOD, FaultRow, Result, Verdict, fault_row, judge
from bench.faults.runner import JobRunner
from bench.faults.tables import crash_table, fault_table, kind_lines
from bench.faults.unsharded import unsharded
from bench.harness.machine import Machine
from bench.harness.printing import say, say_progress
from bench.harness.tables import machine_lines

RANKS = (2, 4)
TIMES = 3
DEADLINE_S = 60.0
WATCHDOG_S = 20.0
NAMES = (*FAULTS, *CRASHES)
QUICK = (
    "another torch version",
    "another shape on one rank, once",
    "out of memory in forward",
    "SIGKILL in forward",
    "crash in a save, in the middle of a file",
)
QUICK_DEADLINE_S = 20.0
SAID_CHARS = 2000


def main(arguments: Sequence[str] | None = None) -> int:
    """Injects, measures and prints."""
    options = parse(arguments)
    machine = Machine.this()
    runner, crash_runner = JobRunner(options.backend, options.deadline, options.watchdog), CrashRunner()
    rows, jobs = [], []
    crashes: list[CrashRow] = []
    for world_size in options.ranks:
        references: dict[tuple[str, int], list[Result] | None] = {}
        for name in options.faults:
            verdicts = []
            for number in range(options.times):
                say_progress(f"{name}, {world_size} ranks, {number + 1} of {options.times}")
                if name in CRASHES:
                    verdict, crashed = crash_runner.verdict(name, world_size)
                    crashes.append(crashed)
                else:
                    verdict = one_job(runner, name, world_size, references)
                verdicts.append(verdict)
                jobs.append(written(name, world_size, verdict))
            rows.append(fault_row(name, world_size, verdicts))
    say(*machine_lines(machine), f"backend {options.backend}, deadline {options.deadline:g} s behind the injection")
    say(*fault_table(rows), *kind_lines(rows), *crash_table(crashes))
    if options.json is not None:
        content = {
            "machine": asdict(machine),
            "rows": [asdict(row) for row in rows],
            "jobs": jobs,
            "crashes": [asdict(row) for row in crashes],
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return exit_status(rows)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; `--quick` chooses what is not given."""
    parser = argparse.ArgumentParser(prog="bench.faults", description="what becomes of a job with a fault on one rank")
    parser.add_argument("--faults", nargs="+", choices=NAMES, metavar="NAME", help=f"some of: {', '.join(NAMES)}")
    parser.add_argument("--ranks", nargs="+", type=int, help=f"numbers of ranks; {' '.join(map(str, RANKS))}")
    parser.add_argument("--times", type=int, help=f"jobs of each fault; {TIMES}")
    parser.add_argument("--deadline", type=float, help=f"seconds from the injection; {DEADLINE_S:g}")
    parser.add_argument("--watchdog", type=float, default=WATCHDOG_S, help=f"deadline of the library; {WATCHDOG_S:g} s")
    parser.add_argument("--backend", choices=("aot_eager", "inductor"), default="aot_eager", help="aot_eager")
    parser.add_argument("--json", type=Path, help="writes machine, rows and jobs to this file")
    parser.add_argument("--quick", action="store_true", help="a few faults, 2 ranks, once")
    options = parser.parse_args(arguments)
    defaults = (QUICK, (2,), 1, QUICK_DEADLINE_S) if options.quick else (NAMES, RANKS, TIMES, DEADLINE_S)
    for option, value in zip(("faults", "ranks", "times", "deadline"), defaults, strict=True):
        if getattr(options, option) is None:
            setattr(options, option, value)
    if min(options.ranks) < 2 or options.times < 1 or min(options.deadline, options.watchdog) <= 0:
        parser.error("--ranks, --times, --deadline, --watchdog: want at least 2 ranks, 1 time, and more than 0 s")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: got {options.json}, want a file in a folder that is there")
    return options


def one_job(
    runner: JobRunner, name: str, world_size: int, references: dict[tuple[str, int], list[Result] | None]
) -> Verdict:
    """Runs one job, and what it is compared with if it ended well."""
    fault = FAULTS[name]
    outcome = runner.run(name, world_size)
    reference = None
    if all(end.result is not None for end in outcome.ends) and fault.reference != "none":
        healthy = fault.reference == "fsdp2, healthy"
        key = ("healthy" if healthy else name, fault.injection.steps)
        if key not in references:
            is_fsdp2 = fault.reference != "unsharded"
            references[key] = runner.reference(name, world_size) if is_fsdp2 else unsharded(name, world_size)
        reference = references[key]
    return judge(fault, outcome, reference)


def written(name: str, world_size: int, verdict: Verdict) -> dict[str, object]:
    """One job in the JSON file."""
    job = {"fault": name, "ranks": world_size, **asdict(verdict)}
    return {**job, "said": [text[-SAID_CHARS:] for text in verdict.said]}


def exit_status(rows: Sequence[FaultRow]) -> int:
    """Of the bench."""
    return int(any(count for row in rows for kind, count in row.counts.items() if kind not in GOOD))


if __name__ == "__main__":
    sys.exit(main())
