"""Measures this machine and writes a hardware file that the cost model reads.

    python -m graphshard.calibrate --out here.json
    torchrun --nproc-per-node 8 -m graphshard.calibrate --out here.json

One process measures matmuls, copies and kernels. Under torchrun it also measures collectives, and what they cost the
compute beside them: on one node the links inside it, on several the network. What a run does not measure stays as it is
in `--merge`, a name of the table or an earlier file; its sources say so.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from graphshard.cost.hardware import HARDWARE, find_hardware
from graphshard.cost.hardware_file import hardware_text
from graphshard.cost.measure import Samples, attention_share, kernel_us, matmul_tflops, memory_gb_s
from graphshard.cost.measure_collectives import MEASURED_KINDS, collective_runs, contention, fit_alpha_beta
from graphshard.cost.rates import Hardware, Protocol
from graphshard.cost.topology import GroupShape

TIMEOUT = timedelta(minutes=5)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m graphshard.calibrate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=Path("graphshard-hardware.json"), help="file to write")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer runs: below a minute on a CPU")
    parser.add_argument("--merge", help="a name of the table or a file, for what is not measured")
    options = parser.parse_args(argv)
    distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    device = torch.device(options.device)
    try:
        base = find_hardware(options.merge or _row_of(device))
    except ValueError as error:
        parser.error(str(error))
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if distributed:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        samples = Samples(device, *((5, 1.0) if options.quick else (15, 5.0)))
        measured = _measured(samples, base, options.quick, distributed)
        if not distributed or dist.get_rank() == 0:
            options.out.write_text(hardware_text(measured, machine(device), samples.raw), encoding="utf-8")
            sys.stdout.write(f"{options.out}: {measured.name}\n{_summary(measured)}")
    finally:
        if distributed:
            dist.destroy_process_group()
    return 0


def machine(device: torch.device) -> dict[str, object]:
    """What was measured, in words, and with which versions."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_model(),
        "cores": os.cpu_count(),
        "threads_per_rank": torch.get_num_threads(),
        "ranks": int(os.environ.get("WORLD_SIZE", "1")),
        "ranks_per_node": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _row_of(device: torch.device) -> str:
    """The row of the table for what is not measured."""
    if device.type == "cpu":
        return "cpu-gloo"
    name = torch.cuda.get_device_name(device).lower()
    found = [row for row in ("h100", "h200", "b200", "a100") if row in name]
    if not found:
        raise ValueError(
            f"--merge: not given, and the table has no {name!r}; want one of {', '.join(sorted(HARDWARE))}"
        )
    return found[0]


def _measured(samples: Samples, base: Hardware, quick: bool, distributed: bool) -> Hardware:
    is_gpu = samples.device.type == "cuda"
    width, copied, tokens = (8192, 2**30, 4096) if is_gpu else (512, 2**25, 512) if quick else (1024, 2**27, 1024)
    rates = matmul_tflops(samples, width)
    values: dict[str, Any] = {
        "name": base.name.removesuffix("-calibrated") + "-calibrated",
        "matmul_tflops": dict(base.matmul_tflops) | rates,
        "attention_share": attention_share(samples, tokens, rates),
        "memory_gb_s": memory_gb_s(samples, copied),
        "kernel_us": kernel_us(samples),
    }
    if is_gpu:
        values["memory_bytes"] = torch.cuda.get_device_properties(samples.device).total_memory
    if distributed:
        values |= _collectives(samples, base, dist.group.WORLD, quick)
        values["contention"] = contention(
            samples, 2**28 if is_gpu else 2**24, 4096 if is_gpu else 256, dist.group.WORLD
        )
    note = f"measured by graphshard.calibrate: {machine(samples.device)['device']}, torch {torch.__version__}"
    return replace(base, **values, sources=dict(base.sources) | {name: note for name in values if name != "name"})


def _collectives(samples: Samples, base: Hardware, group: Any, quick: bool) -> dict[str, Any]:
    """Latency and bandwidth of the links between all ranks: inside a node, or across nodes."""
    is_gpu = samples.device.type == "cuda"
    exponents = (16, 20, 24, 28) if is_gpu else (12, 16, 20, 22) if quick else (12, 16, 20, 22, 24)
    sizes = [2**exponent for exponent in exponents]
    fits = {kind: fit_alpha_beta(collective_runs(samples, kind, sizes, group)) for kind in MEASURED_KINDS}
    ranks, per_node = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    shape = GroupShape(ranks, -(-ranks // per_node))
    moved = {kind: (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks for kind in MEASURED_KINDS}
    reached = {kind: moved[kind] / beta / 1e3 for kind, (_, beta) in fits.items()}
    best = max(reached.values())
    steps = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
    alpha_us = sum(fits[kind][0] / steps[kind] for kind in MEASURED_KINDS) / len(MEASURED_KINDS)
    protocol = _protocol(base.protocols[-1], shape, alpha_us)
    found: dict[str, Any] = {
        "protocols": (protocol,),
        "kind_share": {kind: rate / best for kind, rate in reached.items()},
    }
    if shape.nodes == 1:
        return found | {"link_gb_s": best, "ranks_per_node": max(per_node, base.ranks_per_node)}
    # The slowest hop is what was seen: nothing else in the path is slower.
    nic, link = max(base.nic_gb_s, best / shape.ranks_per_node), max(base.link_gb_s, best)
    return found | {"network_gb_s": best, "nic_gb_s": nic, "link_gb_s": link, "ranks_per_node": per_node}


def _protocol(base: Protocol, shape: GroupShape, alpha_us: float) -> Protocol:
    """One protocol with the measured latency, split between base and steps as in `base`."""
    steps_us = (shape.ranks - shape.nodes) * base.step_us + (shape.nodes - 1) * base.network_step_us
    factor = alpha_us / (base.base_us + steps_us)
    return Protocol("measured", base.base_us * factor, base.step_us * factor, base.network_step_us * factor)


def _summary(hardware: Hardware) -> str:
    names = ("matmul_tflops", "attention_share", "memory_gb_s", "kernel_us", "link_gb_s", "network_gb_s", "contention")
    return "".join(f"  {name}: {getattr(hardware, name)}\n" for name in names)


if __name__ == "__main__":
    sys.exit(main())
