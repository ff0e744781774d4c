"""A training job that does everything over and over, and what a process holds meanwhile."""

from __future__ import annotations

import gc
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from bench.harness.models import ManyParameters
from graphshard.compat.store import default_store

# How often, in steps.
ACCUMULATES, EVALUATES, GATHERS, STAYS, SAVES, RUNS_EAGER, FREEZES = 4, 10, 25, 30, 200, 250, 300
ROWS = (2, 3, 5)


@dataclass(frozen=True)
class Sample:
    """What one process holds at a step.

    Attributes:
        step: behind it.
        rss_kib: resident memory.
        threads: of the process.
        python_threads: of them, Python's.
        files: open file descriptors.
        objects: that the garbage collector tracks.
        tensors: of them, tensors.
        programs: in the report.
        lines: in the report's text.
        store_keys: of the job's store.
    """

    step: int
    rss_kib: int
    threads: int
    python_threads: int
    files: int
    objects: int
    tensors: int
    programs: int
    lines: int
    store_keys: int


def sample(step: int, model: Any) -> Sample:
    gc.collect()
    tracked = gc.get_objects()
    status = Path("/proc/self/status").read_text()
    rss = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    report = graphshard.report(model)
    return Sample(
        step,
        int(rss.split()[1]),
        _entries("/proc/self/task"),
        threading.active_count(),
        _entries("/proc/self/fd"),
        len(tracked),
        sum(isinstance(each, torch.Tensor) for each in tracked),
        len(report.programs),
        len(str(report).splitlines()),
        default_store().num_keys(),
    )


def train(steps: int, every: int, backend: str, width: int) -> list[Sample]:
    """Runs on each rank; returns a sample each `every` steps."""
    torch.manual_seed(0)
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = graphshard.compile(ManyParameters(24, 1, width), mesh, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    folder = Path(tempfile.mkdtemp(prefix="graphshard-long-")) if rank == 0 else Path()
    folders: list[Any] = [folder]
    dist.broadcast_object_list(folders)
    found = []
    for step in range(1, steps + 1):
        generator = torch.Generator().manual_seed(step * 31 + rank)
        x = torch.randn(ROWS[step // 7 % len(ROWS)], width, generator=generator)
        if step % EVALUATES == 0:
            with torch.no_grad():
                model(x)
        if step % GATHERS == 0:
            model.unshard()
        if step % FREEZES == 0:
            bias = model.blocks[0].up.bias
            bias.requires_grad_(not bias.requires_grad)
        model.set_requires_gradient_sync(step % ACCUMULATES == 0)
        model.set_reshard_after_backward(step % STAYS != 0)
        if step % RUNS_EAGER == 0:
            with graphshard.eager(model):
                model(x).backward()
        else:
            model(x).backward()
        if step % ACCUMULATES == 0:
            optimizer.step()
            optimizer.zero_grad()
        if step % SAVES == 0:
            _save_and_load(model, folders[0] / "checkpoint")
        if step % every == 0:
            found.append(sample(step, model))
    return found


def _save_and_load(model: Any, folder: Path) -> None:
    model.reshard()
    state = get_model_state_dict(model)
    dcp.save(state, checkpoint_id=folder)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state)


def _entries(folder: str) -> int:
    return sum(1 for _ in Path(folder).iterdir())
