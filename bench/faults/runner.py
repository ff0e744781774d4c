"""Starts the ranks of one job as fresh processes, waits until they end or the deadline has passed, and ends them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from bench.faults.catalog import FAULTS, Fault
from bench.faults.outcomes import JobOutcome, RankEnd, Result
from bench.faults.worker import Spec, odd_rank
from graphshard.testing.environment import worker_environment

# Until the injection: imports, compilation, and steps before it.
START_S = 240.0
LOOK_S = 0.05
STACK_S = 1.0


@dataclass(frozen=True)
class JobRunner:
    """Runs jobs.

    Attributes:
        backend: of `graphshard.compile`.
        deadline_s: from the injection; then all ranks are ended, and it was a hang.
        watchdog_s: given to `graphshard.compile` where it takes a deadline.
    """

    backend: str
    deadline_s: float
    watchdog_s: float

    def run(self, name: str, world_size: int) -> JobOutcome:
        """One job with a fault."""
        fault = FAULTS[name]
        backend = fault.backend or self.backend
        with tempfile.TemporaryDirectory(prefix="graphshard-faults-") as caches:
            if fault.warm:
                self._run(name, world_size, backend, Path(caches), healthy=True)
                shutil.rmtree(_cache(Path(caches), odd_rank(world_size)))
            return self._run(name, world_size, backend, Path(caches))

    def reference(self, name: str, world_size: int) -> list[Result] | None:
        """What eager FSDP2 has; None: it did not come to an end."""
        healthy = FAULTS[name].reference == "fsdp2, healthy"
        with tempfile.TemporaryDirectory(prefix="graphshard-faults-") as caches:
            outcome = self._run(name, world_size, "fsdp2", Path(caches), healthy)
        results = [end.result for end in outcome.ends if end.result is not None]
        return results if len(results) == world_size else None

    def _run(self, name: str, world_size: int, backend: str, caches: Path, healthy: bool = False) -> JobOutcome:
        with tempfile.TemporaryDirectory(prefix="graphshard-faults-") as path:
            folder = Path(path)
            store = TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
            Spec(name, world_size, store.port, backend, self.watchdog_s, healthy).write(folder)
            with _ranks(folder, world_size, caches) as processes:
                return self._wait(FAULTS[name], folder, processes)

    def _wait(self, fault: Fault, folder: Path, processes: list[subprocess.Popen[bytes]]) -> JobOutcome:
        odd = odd_rank(len(processes))
        live = [rank for rank in range(len(processes)) if not (fault.kills and rank == odd)]
        ended: dict[int, float] = {}
        injected_s: float | None = None
        end_s = time.time() + START_S
        while time.time() < end_s and not all(rank in ended for rank in live):
            time.sleep(LOOK_S)
            for rank, process in enumerate(processes):
                if rank not in ended and process.poll() is not None:
                    ended[rank] = time.time()
            if injected_s is None and (injected_s := _injected_s(folder)) is not None:
                end_s = injected_s + self.deadline_s + fault.compiles_s
        for rank in live:
            if rank not in ended:
                processes[rank].send_signal(signal.SIGUSR1)  # where it stands
                time.sleep(STACK_S)
        for process in processes:
            process.kill()
            process.wait()
        return JobOutcome(
            odd,
            injected_s if injected_s is not None else _injected_s(folder),
            tuple(
                RankEnd(
                    rank,
                    process.returncode if rank in ended else None,
                    ended.get(rank, time.time()),
                    (folder / f"stderr{rank}").read_text(errors="replace"),
                    _result(folder / f"result{rank}.pt") if rank in ended else None,
                )
                for rank, process in enumerate(processes)
            ),
        )


def _cache(caches: Path, rank: int) -> Path:
    return caches / f"rank{rank}"


def _injected_s(folder: Path) -> float | None:
    times = [text for file in folder.glob("injected*") if (text := file.read_text())]
    return min(map(float, times), default=None)


def _result(file: Path) -> Result | None:
    return torch.load(file) if file.exists() else None


@contextmanager
def _ranks(folder: Path, world_size: int, caches: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world_size):
            variables = {
                **worker_environment(),
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "TORCHINDUCTOR_CACHE_DIR": str(_cache(caches, rank)),
                "RANK": str(rank),  # torch and loggers may ask
                "WORLD_SIZE": str(world_size),
            }
            with (folder / f"stderr{rank}").open("wb") as said:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "bench.faults.worker", str(folder), str(rank)],
                        env=variables,
                        stdin=subprocess.DEVNULL,
                        stdout=said,
                        stderr=said,
                    )
                )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
