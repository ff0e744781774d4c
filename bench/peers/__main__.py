"""What users can train with, side by side: `python -m bench.peers [--quick] [--only features|steps] [--json FILE] ...`.

What trains, and what does not: twelve things that users do besides a plain step (`bench.peers.features`). How fast:
measured as in `bench.step`, whose processes and checks it uses: steps in turns, on one machine, in one run; beside that
bytes of text a second, over all ranks; seconds of the first step cold and, in new processes, with what the cold one
left in Inductor's cache; and the lines that a user adds to a script that trains on one rank.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from bench.harness.bars import Bar, write_svg
from bench.harness.machine import Machine, versions
from bench.harness.printing import say, say_progress
from bench.harness.systems import PEERS, System, SystemName
from bench.harness.tables import align, machine_lines
from bench.peers.features import FEATURES, try_features
from bench.step.models import TRAINED
from bench.step.rows import TrainingRow, check_row, check_training, training_rows
from bench.step.training import processes, train
from graphshard.testing import shutdown_pools

NUM_RANKS, MIB = 2, 2**20
RUNS, ROUNDS = 5, 6
QUICK_RUNS, QUICK_ROUNDS = 2, 1
MODELS = ("d128_L12", "demo")
SYSTEMS = (
    System("fsdp2", "eager"),
    System("fsdp2+compile", "inductor"),
    System("ddp+compile", "inductor"),
    System("replicate+compile", "inductor"),
    System("simplefsdp", "inductor"),
    System("graphshard", "inductor", "auto"),
)
# What is added behind the model, for each system; imports and the mesh are the same for all.
LINES = {
    "fsdp2": "for block in model.blocks:\n    fully_shard(block, mesh=mesh)\nfully_shard(model, mesh=mesh)",
    "fsdp2+compile": "for i, block in enumerate(model.blocks):\n    model.blocks[i] = torch.compile(block)\n"
    "    fully_shard(model.blocks[i], mesh=mesh)\nfully_shard(model, mesh=mesh)",
    "ddp+compile": "model = DistributedDataParallel(torch.compile(model))",
    "replicate+compile": "for i, block in enumerate(model.blocks):\n    model.blocks[i] = torch.compile(block)\n"
    "    replicate(model.blocks[i], mesh=mesh)\nreplicate(model, mesh=mesh)",
    "simplefsdp": "model = torch.compile(data_parallel(model, mesh, 'fully_shard'))\n(loss / mesh.size()).backward()",
    "graphshard": "graphshard.compile(model, mesh)",
}
HEADER = ("system", "step ms", "ratio", "bytes/s", "peak MiB", "first step s", "warm s", "lines")


@dataclass(frozen=True)
class PeerRow:
    """One system on one model.

    Attributes:
        step: as of `bench.step`; `compile_s` is the cold first step.
        bytes_per_s: of text, over all ranks.
        warm_s: seconds of the first step of new processes with the same cache.
        lines: that a user adds.
    """

    step: TrainingRow
    bytes_per_s: float
    warm_s: float
    lines: int

    def cells(self) -> tuple[str, ...]:
        """Of the table."""
        step = self.step
        return (
            step.system,
            f"{step.step_ms:.1f}",
            "-" if step.ratio is None else f"{step.ratio:.2f}",
            f"{self.bytes_per_s:.0f}",
            f"{step.peak_rss_bytes / MIB:.0f}",
            f"{step.compile_s:.1f}",
            f"{self.warm_s:.1f}",
            str(self.lines),
        )


def measure(model: str, systems: Sequence[System], runs: int, rounds: int) -> list[PeerRow]:
    """Trains one model with every system, and says which did not do the same.

    Raises:
        RuntimeError: graphshard did not.
    """
    with tempfile.TemporaryDirectory(prefix="graphshard-peers-", ignore_cleanup_errors=True) as folder:
        caches = Path(folder)
        measured = train(model, systems, NUM_RANKS, runs, rounds, say_progress, caches)
        norms = measured[systems[0]].first[0].grad_norms
        checks = [check_row(model, system, m.first, m.turns, norms) for system, m in measured.items()]
        for check in checks[1:]:
            try:
                check_training([checks[0], check])
            except RuntimeError as error:  # of a peer, the table has its figures, and this
                if check.system == "graphshard":
                    raise
                say(f"NOTE: {error}")
        warm_s = {}
        for system in systems:
            say_progress(f"{model}: {system}: first step, warm")
            with processes(model, system, NUM_RANKS, caches) as ranks:
                warm_s[system] = max(first.first_step_s for first in ranks.call("first_steps"))
    sizes = TRAINED[model]
    size = NUM_RANKS * sizes.batch_size * sizes.config.max_seq_len
    rows = training_rows(model, {s: m.first for s, m in measured.items()}, {s: m.turns for s, m in measured.items()})
    return [
        PeerRow(row, 1e3 * size / row.step_ms, warm_s[system], len(LINES[row.system].splitlines()))
        for system, row in zip(systems, rows, strict=True)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit status."""
    parser = argparse.ArgumentParser(prog="bench.peers", description="what users can train with, side by side")
    parser.add_argument("--models", nargs="+", choices=[*TRAINED], default=[*MODELS], metavar="M")
    parser.add_argument("--json", type=Path, help="writes versions, machine and rows to this file")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draws steps into this file; needs rich")
    parser.add_argument("--only", choices=("features", "steps"), help="both")
    parser.add_argument("--quick", action="store_true", help="few steps, one feature: shows that it works, no results")
    options = parser.parse_args(argv)
    if options.picture is not None and find_spec("rich") is None:
        parser.error("--picture: it is drawn by rich, which is not installed: pip install rich")
    machine = Machine.this()
    say(*machine_lines(machine))
    systems = [system for system in SYSTEMS if system.name != "simplefsdp" or find_spec("torchtitan")]
    if len(systems) < len(SYSTEMS):
        say("NOTE: torchtitan is not installed: no SimpleFSDP (pip install --no-deps torchtitan)")
    say("NOTE: DeepSpeed's ZeRO-3 and DeepCompile need a GPU", f"ratio: to the faster of {' and '.join(PEERS)}")
    names = [system.name for system in systems]
    tried: dict[str, dict[SystemName, str]] = {}
    if options.only != "steps":
        tried = try_features(names, [*FEATURES][: 1 if options.quick else None], NUM_RANKS, say_progress)
        shutdown_pools()
        say("", "Trains as eager FSDP2 does, with the lines that a user adds, none of them for the feature", "")
        say(*align(("feature", *names), [(feature, *found.values()) for feature, found in tried.items()]))
    rows = []
    for model in options.models if options.only != "features" else ():
        runs, rounds = (QUICK_RUNS, QUICK_ROUNDS) if options.quick else (RUNS, ROUNDS)
        found = measure(model, systems, runs, rounds)
        say("", f"{model}, {NUM_RANKS} gloo ranks", *align(HEADER, [row.cells() for row in found]))
        rows += found
    if options.json is not None:
        told = {"versions": versions(), "machine": asdict(machine), "features": tried}
        told["rows"] = [asdict(row) for row in rows]
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    if options.picture is not None and rows:
        write_svg(options.picture, "Training step, ms", ("step",), [bar_of(row) for row in rows])
    return 0


def bar_of(row: PeerRow) -> Bar:
    """Of a step."""
    step = row.step
    return Bar((step.model, step.system), (step.step_ms,), f"{step.step_ms:.0f} ms")


if __name__ == "__main__":
    sys.exit(main())
