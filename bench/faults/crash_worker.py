"""A rank of the demo's trainer that may end at a point: for torchrun, `-m bench.faults.crash_worker FOLDER`."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench.faults import model as faults_model
from bench.faults.crash_points import Crasher, CrashingCheckpoints, CrashingDecoder
from bench.faults.crashes import CONFIG, EVERY, STEPS, Crash
from bench.faults.worker import odd_rank
from graphshard.demo.restartable import RunOptions, start_process_group, train

GROUP_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class CrashSpec:
    """What is run; a file in the job's folder.

    Attributes:
        crash: that happens; None: nothing does.
        backend: of `graphshard.compile`.
        dropout: of the model.
        launch: the how manieth torchrun of this job it is, from 0.
    """

    crash: Crash | None
    backend: str
    dropout: float
    launch: int = 0

    def write(self, folder: Path) -> None:
        (folder / "spec.json").write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(folder: Path) -> CrashSpec:
        content = json.loads((folder / "spec.json").read_text())
        crash = content.pop("crash")
        return CrashSpec(None if crash is None else Crash(**crash), **content)


def crasher_of(spec: CrashSpec, folder: Path, rank: int, world_size: int, attempt: int) -> Crasher | None:
    """That of a rank in an attempt; None: it does not end."""
    crash = spec.crash
    if crash is None or spec.launch or attempt >= len(crash.numbers):
        return None
    if rank not in {"odd": (odd_rank(world_size),), "first": (0,), "all": range(world_size)}[crash.ranks]:
        return None

    def end() -> None:
        (folder / f"crashed{attempt}.{rank}").write_text(repr(time.time()))
        if crash.ends_launcher:
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.Signals[crash.signal])

    return Crasher(crash.point, crash.numbers[attempt], end)


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0])
    spec = CrashSpec.read(folder)
    torch.set_num_threads(1)
    start_process_group(GROUP_TIMEOUT_S)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    crasher = crasher_of(spec, folder, rank, world_size, attempt)
    if crasher is not None:
        crasher.install()

    def at(where: str) -> None:
        if crasher is not None:
            crasher.at(where)

    def say(line: str) -> None:
        if rank == 0:
            print(line, flush=True)

    options = RunOptions(
        folder / "checkpoints",
        STEPS,
        EVERY,
        resume=True,
        backend=spec.backend,
        log=folder / f"losses{spec.launch}",
        config=replace(CONFIG, dropout=spec.dropout),
    )
    try:
        mesh = init_device_mesh("cpu", (world_size,))
        return train(options, mesh, say, CrashingDecoder, partial(CrashingCheckpoints, at=at))
    finally:
        faults_model.on_point.clear()
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
