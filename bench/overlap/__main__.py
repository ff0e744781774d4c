"""Communication that a step does not hide: `python -m bench.overlap [--quick] [--layers N] [--json FILE]`.

Trains a decoder with blocks of Llama 3 8B on one GPU, whose collectives run on pretended networks (`bench.networks`):
eager FSDP2, FSDP2 with compiled blocks, a per-parameter baseline, and graphshard. Each system has a process of its own.
Without CUDA only `--quick` runs: a tiny decoder on the CPU, whose timings are no results. The exit status is 0 whatever
the numbers are, 1 if a system fails or computes something else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import graphshard
from bench.harness.machine import Gpu, Machine
from bench.harness.printing import say, say_progress
from bench.harness.tables import claim_table, gpu_line, machine_lines
from bench.overlap.rows import OverlapRow, OverlapRun, PretendedNetwork, check_losses, overlap_claims, overlap_table
from bench.overlap.systems import AUTO, LLAMA_8B, PEERS, REFERENCE, SYSTEMS, OverlapSystem

# 8 GPUs behind one switch, and 4 such machines.
NETWORKS = (PretendedNetwork(8, 32.0, 361.0), PretendedNetwork(32, 220.0, 200.0))
QUICK_NETWORKS = (PretendedNetwork(4, 500.0, 1.0),)
# Of Llama's 32: whole graphs of so many compile in the minutes that there are.
LAYERS, QUICK_LAYERS = 8, 2
TOKENS, QUICK_TOKENS = 8192, 32
STEPS, QUICK_STEPS = 8, 2
MINUTES = 7.0
_END_S = 10.0


@dataclass(frozen=True)
class OverlapOptions:
    """What is asked for.

    Attributes:
        layers: blocks of the decoder.
        tokens: of the sequence of a rank.
        steps: timed ones.
        minutes: for all; what is not measured by then is left out by name.
        backend: of everything that compiles.
    """

    systems: tuple[OverlapSystem, ...]
    networks: tuple[PretendedNetwork, ...]
    layers: int
    tokens: int
    steps: int
    minutes: float
    device: str
    backend: str
    quick: bool
    json: Path | None


def parse_options(argv: Sequence[str] | None = None) -> OverlapOptions:
    """Reads the command line; leaves the program, with a line that says why, if it asks for something impossible."""
    parser = argparse.ArgumentParser(prog="bench.overlap", description="exposed communication on pretended networks")
    parser.add_argument("--quick", action="store_true", help="a tiny decoder on the CPU: shows that it works")
    parser.add_argument("--layers", type=int, help=f"blocks, of {LLAMA_8B.layers}; {LAYERS}")
    parser.add_argument("--tokens", type=int, help=f"of a sequence; {TOKENS}")
    parser.add_argument("--steps", type=int, help=f"timed ones; {STEPS}")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for all; {MINUTES:g}")
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, default=[*SYSTEMS], metavar="S", help="; ".join(SYSTEMS)
    )
    parser.add_argument(
        "--networks", nargs="+", type=PretendedNetwork.parse, metavar="RANKS:US:GB/S",
        help=" ".join(network.text for network in NETWORKS),
    )  # fmt: skip
    parser.add_argument("--backend", choices=("inductor", "aot_eager"), default="inductor", help="inductor")
    parser.add_argument("--json", type=Path, help="writes machine, rows and claims to this file")
    args = parser.parse_args(argv)
    quick = args.quick
    usual = (QUICK_LAYERS, QUICK_TOKENS, QUICK_STEPS) if quick else (LAYERS, TOKENS, STEPS)
    numbers = {}
    for name, default in zip(("layers", "tokens", "steps"), usual, strict=True):
        numbers[name] = default if getattr(args, name) is None else getattr(args, name)
        if numbers[name] < 1:
            parser.error(f"--{name}: got {numbers[name]}, want at least 1")
    if not args.minutes > 0.0:
        parser.error(f"--minutes: got {args.minutes}, want more than 0")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        parser.error(f"--json: got {args.json}, want a file in a folder that is there")
    if not quick and not torch.cuda.is_available():
        parser.error("no CUDA device is there: only --quick runs without one")
    return OverlapOptions(
        systems=tuple(dict.fromkeys(args.systems)),
        networks=tuple(dict.fromkeys(args.networks or (QUICK_NETWORKS if quick else NETWORKS))),
        **numbers,
        minutes=args.minutes,
        device="cpu" if quick else "cuda",
        backend=args.backend,
        quick=quick,
        json=args.json,
    )


def measure(system: OverlapSystem, options: OverlapOptions, end_s: float) -> list[OverlapRow]:
    """One system in a process of its own: what it has measured when it ends, or when time is over."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "runs.json")
        command = [sys.executable, "-m", "bench.overlap.worker", system, "--json", str(results)]
        command += ["--networks", *(network.text for network in options.networks), "--device", options.device]
        for name in ("layers", "tokens", "steps", "backend"):
            command += [f"--{name}", str(getattr(options, name))]
        why_not = ""
        try:
            left_s = max(1.0, end_s - time.monotonic())
            ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=left_s)
            if ended.returncode:
                why_not = f"it ended with {ended.returncode}: {_last_line(ended.stderr)}"
        except subprocess.TimeoutExpired:
            why_not = f"the {options.minutes:g} minutes of --minutes were over"
        runs = [OverlapRun.read(fields) for fields in json.loads(results.read_text())] if results.exists() else []
    rows = [OverlapRow(system, network, run) for network, run in zip(options.networks, runs, strict=False)]
    rows += [OverlapRow(system, network, None, why_not) for network in options.networks[len(runs) :]]
    return rows


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    machine, on_gpu = Machine.this(), options.device == "cuda"
    gpu = Gpu.this(torch.device("cuda", torch.cuda.current_device())) if on_gpu else None
    say(*machine_lines(machine), *([] if gpu is None else [gpu_line(gpu)]), f"graphshard {graphshard.__version__}")
    if options.quick:
        say("NOTE: --quick runs a tiny decoder on the CPU: these timings are no results")
    end_s = time.monotonic() + 60.0 * options.minutes - _END_S
    rows: list[OverlapRow] = []
    for system in options.systems:
        say_progress(system)
        rows += measure(system, options, end_s)
    rows.sort(key=lambda row: options.networks.index(row.network))
    say(
        "",
        f"Steps of a decoder with {options.layers} blocks, {options.tokens} tokens a rank, fp32 parameters, bf16",
        f"gathers, fp32 reductions, fused AdamW, backend {options.backend}; medians of {options.steps} steps. Peers on",
        "pretended networks mirror this rank. exposed: only the network is busy; share: of the step; bound: what no",
        "schedule can hide, by the simulator, whose predictions stand beside what was measured",
        "",
        *overlap_table(rows, PEERS),
        *(f"NOTE: {row.system}, {row.network.name}: not measured: {row.why_not}" for row in rows if row.run is None),
        *(
            f"NOTE: {row.system}, {row.network.name}: exposed: not measured: the profiler sees no kernels"
            for row in rows
            if row.run is not None and row.run.exposed_us is None
        ),
    )
    wrong = check_losses(rows)
    claims = overlap_claims(rows, PEERS, AUTO, REFERENCE, on_gpu)
    say("", *claim_table(claims), *(f"OTHER LOSSES: {line}" for line in wrong))
    if options.json is not None:
        written = {
            "machine": asdict(machine),
            "gpu": None if gpu is None else asdict(gpu),
            "options": {**asdict(options), "json": str(options.json)},
            "rows": [asdict(row) for row in rows],
            "claims": [asdict(claim) for claim in claims],
            "wrong": wrong,
        }
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    return int(bool(wrong) or any(row.run is None for row in rows))


if __name__ == "__main__":
    sys.exit(main())
