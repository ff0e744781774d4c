"""``graphshard plan``: what a training step would take on any number of GPUs, from a laptop.

    graphshard plan --model llama3-8b --world 8..512 --hardware h100 --batch 2 --checkpointing selective

The model is traced once, on tensors without data; every number of ranks is then a calculation.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from graphshard.cost import HARDWARE, find_hardware
from graphshard.scale.blocks import NotRepeated
from graphshard.scale.checkpointing import CHECKPOINTING
from graphshard.scale.estimate import Setting, StepEstimate, Workload, estimate_step
from graphshard.scale.models import STATES, ModelChoice, make_workload
from graphshard.scale.presets import PRESETS
from graphshard.scale.resize import RankLayout

PLANS = ("auto", "fsdp2")
_MOST_RANKS = 2**20
_SUFFIXES = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_MFU = (
    "MFU: 3 x FLOPs of one forward (matmuls and attention; causal attention half) x microbatches / (step x peak bf16 "
    "FLOP/s); what is recomputed does not count"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``graphshard plan``."""
    parser.add_argument(
        "--model",
        required=True,
        help=f"{', '.join(PRESETS)}, or module:function, a function of (batch, seq) that returns a module, whose "
        "forward returns the loss, and its inputs",
    )
    parser.add_argument("--world", required=True, help="GPUs: 64, or 8,64,512, or 8..16384 (each twice the one before)")
    parser.add_argument(
        "--hardware", default="h100", help=f"{', '.join(sorted(HARDWARE))}, or a file of graphshard.calibrate"
    )
    parser.add_argument("--hsdp", metavar="AxB", help="A copies of B shards; xB: as many copies as there are GPUs for")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks of tensor parallelism (llama3 presets)")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a microbatch, of each rank or TP group")
    parser.add_argument("--seq", type=int, default=0, help="tokens of a sequence; the preset's by default")
    parser.add_argument("--accumulation", type=int, default=1, metavar="N", help="microbatches of a step")
    parser.add_argument("--checkpointing", choices=CHECKPOINTING, default="none", help="of activations")
    parser.add_argument("--states", choices=tuple(STATES), default="float32", help="dtype of parameters and moments")
    parser.add_argument("--backend", choices=("inductor", "aot_eager"), default="inductor", help="of the programs")
    parser.add_argument("--plan", choices=PLANS, default="auto", help="searched, or FSDP2's own schedule")
    parser.add_argument(
        "--memory-budget", metavar="X", help="most that a rank may allocate: bytes, 60GiB, or a share such as 0.9"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the numbers, too")


def run(args: argparse.Namespace) -> int:
    """Runs ``graphshard plan``; returns its exit status: 0, or 2 for arguments that make no sense."""
    try:
        layouts = [_layout(world, args.hsdp, args.tp) for world in _worlds(args.world)]
        hardware = find_hardware(args.hardware)
        budget_bytes = None if args.memory_budget is None else _budget_bytes(args.memory_budget, hardware.memory_bytes)
        if args.accumulation < 1:
            raise ValueError(f"accumulation: got {args.accumulation}, want at least 1")
        choice = ModelChoice(args.model, args.batch, args.seq, args.checkpointing, args.states, args.tp)
        began = time.perf_counter()
        workload = make_workload(choice)
        traced_s = time.perf_counter() - began
        settings = [
            Setting(hardware, layout, args.plan, budget_bytes, args.accumulation, args.backend == "inductor")
            for layout in layouts
        ]
        estimates, workload = _estimates(choice, workload, settings)
    except (ValueError, RuntimeError) as error:
        sys.stderr.write(f"graphshard plan: {error}\n")
        return 2
    sys.stdout.write(f"{_heading(args, workload, traced_s)}\n{table(estimates)}\n")
    if args.json is not None:
        args.json.write_text(json.dumps([as_json(one) for one in estimates], indent=2) + "\n", encoding="utf-8")
    return 0


def _estimates(
    choice: ModelChoice, workload: Workload, settings: Sequence[Setting]
) -> tuple[list[StepEstimate], Workload]:
    """Estimates, from a trace of every block where a few do not stand for them."""
    try:
        return [estimate_step(workload, setting) for setting in settings], workload
    except NotRepeated:
        workload = make_workload(choice, all_blocks=True)
        return [estimate_step(workload, setting) for setting in settings], workload


def _heading(args: argparse.Namespace, workload: Workload, traced_s: float) -> str:
    return (
        f"{args.model} on {args.hardware}, plan {args.plan}: {workload.tokens:,} tokens x {args.accumulation} per rank "
        f"or TP group and step, checkpointing {args.checkpointing}; traced in {traced_s:.1f} s\n{_MFU}\n"
    )


def table(estimates: Sequence[StepEstimate]) -> str:
    """One line for each number of GPUs, in plain text."""
    names = list(estimates[0].memory_bytes)
    head = [
        "GPUs",
        "layout",
        "step ms",
        "tokens/s/GPU",
        "exposed ms",
        "bound ms",
        "MFU",
        "peak GiB",
        *names,
        "schedules",
    ]
    rows = [head]
    for one in estimates:
        layout = one.setting.layout
        rows.append(
            [
                str(layout.world_size),
                str(layout),
                f"{one.step_us / 1e3:,.1f}",
                f"{one.tokens_per_s:,.0f}",
                f"{one.exposed_us / 1e3:,.1f}",
                f"{one.lower_bound_us / 1e3:,.1f}",
                "-" if one.mfu is None else f"{one.mfu:.1%}",
                f"{one.peak_bytes / 2**30:.1f}" + ("" if one.fits else " > memory"),
                *(f"{one.memory_bytes[name] / 2**30:.1f}" for name in names),
                " ".join(dict.fromkeys(one.schedules)),
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def as_json(estimate: StepEstimate) -> dict[str, object]:
    """The numbers of one estimate."""
    layout = estimate.setting.layout
    return {
        "world_size": layout.world_size,
        "shards": layout.shards,
        "copies": layout.copies,
        "tensor_ranks": layout.tensor,
        "hardware": estimate.setting.hardware.name,
        "plan": estimate.setting.plan,
        "schedules": list(estimate.schedules),
        "step_us": estimate.step_us,
        "forward_us": estimate.forward_us,
        "backward_us": estimate.backward_us,
        "optimizer_us": estimate.optimizer_us,
        "exposed_us": estimate.exposed_us,
        "lower_bound_us": estimate.lower_bound_us,
        "tokens_per_s_per_rank": estimate.tokens_per_s,
        "mfu": estimate.mfu,
        "peak_bytes": estimate.peak_bytes,
        "memory_bytes": dict(estimate.memory_bytes),
        "fits": estimate.fits,
    }


def _worlds(text: str) -> list[int]:
    low, dots, high = text.partition("..")
    try:
        if dots:
            world, last, worlds = int(low), int(high), []
            while 1 <= world <= min(last, _MOST_RANKS):
                worlds.append(world)
                world *= 2
        else:
            worlds = [int(part) for part in text.split(",")]
    except ValueError:
        worlds = []
    if not worlds or not all(1 <= world <= _MOST_RANKS for world in worlds):
        raise ValueError(f"world: got {text!r}, want 64, or 8,64,512, or 8..16384, from 1 to {_MOST_RANKS}")
    return worlds


def _layout(world: int, hsdp: str | None, tensor: int) -> RankLayout:
    if tensor < 1 or world % tensor:
        raise ValueError(f"tp: got {tensor} for {world} GPUs, want a factor of them")
    ranks = world // tensor
    if hsdp is None:
        return RankLayout(ranks, 1, tensor)
    copies_text, cross, shards_text = hsdp.partition("x")
    try:
        shards = int(shards_text) if cross else 0
        copies = int(copies_text) if copies_text else ranks // max(1, shards)
    except ValueError:
        shards = copies = 0
    if shards < 1 or copies < 1 or shards * copies != ranks:
        left = f"{world} GPUs" + (f" / tp {tensor}" if tensor > 1 else "")
        raise ValueError(f"hsdp: got {hsdp!r}, want AxB with A copies x B shards = {ranks} ({left}), or xB")
    return RankLayout(shards, copies, tensor)


def _budget_bytes(text: str, memory_bytes: int) -> int:
    lower = text.strip().lower()
    suffix = next((suffix for suffix in _SUFFIXES if lower.endswith(suffix)), "")
    try:
        number = float(lower.removesuffix(suffix))
    except ValueError:
        number = -1.0
    if not suffix and 0.0 < number <= 1.0:
        return int(number * memory_bytes)
    if not 1.0 <= number < float("inf") and not (suffix and 0.0 < number < float("inf")):
        raise ValueError(f"memory-budget: got {text!r}, want bytes, such as 60GiB, or a share of memory in (0, 1]")
    return int(number * _SUFFIXES.get(suffix, 1))
