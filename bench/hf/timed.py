"""Seconds of training steps of one class, each system in fresh processes, which take turns; and their memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import graphshard
from bench.harness.compiler import start_compiler
from bench.harness.printing import say_progress
from bench.harness.processes import Ranks
from bench.hf.compared import Asked, loss_of
from graphshard.testing.allocations import allocated_by

FSDP2, COMPILED, GRAPHSHARD = "fsdp2", "fsdp2+compile", "graphshard"
TIMED = (FSDP2, COMPILED, GRAPHSHARD)
SETTLING_STEPS, ROUNDS, RUNS = 3, 6, 5
TIMEOUT_S = 600.0
LOSS_BOUND = 1e-4  # relative: Inductor rounds otherwise


class ClassTimer:
    """Trains a class with one system, in a process of its own on each rank."""

    def __init__(self, system: str, asked: Asked) -> None:
        if system != FSDP2:
            start_compiler(asked.backend)
        torch.manual_seed(0)
        self._asked, self._steps, self._loss = asked, 0, 0.0
        self._model = asked.build()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        if system == GRAPHSHARD:
            graphshard.compile(self._model, mesh, backend=asked.backend, plan=asked.plan)
        else:
            for unit in graphshard.find_units(self._model):
                if system == COMPILED:
                    unit.compile(backend=asked.backend)
                fully_shard(unit, mesh=mesh)
            fully_shard(self._model, mesh=mesh)
        trained = [param for param in self._model.parameters() if param.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)

    def first_step(self) -> tuple[float, float]:
        """Its seconds and its loss. Some more follow, untimed."""
        first_s, loss = self._step(), self._loss
        for _ in range(SETTLING_STEPS):
            self._step()
        gc.collect()
        gc.disable()
        return first_s, loss

    def turn(self, runs: int) -> list[float]:
        """Seconds of some steps; one more, in which the process wakes up, is not timed."""
        seconds = [self._step() for _ in range(1 + runs)][1:]
        gc.collect()
        return seconds

    def peak_bytes(self) -> int:
        """Most bytes that torch's allocator gave out in a step and had not got back, beside what it held before."""
        return allocated_by(self._step).peak

    def _step(self) -> float:
        _, batch = self._asked.inputs(self._steps, dist.get_rank())
        self._steps += 1
        dist.barrier()
        start_s = time.perf_counter()
        loss = loss_of(self._model(**batch))
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        end_s = time.perf_counter()
        self._loss = loss.item()
        return end_s - start_s


@dataclass(frozen=True)
class ClassTimes:
    """Of one class with one system; of the slower rank.

    Attributes:
        failed: why there are no numbers; empty: there are.
        first_s: seconds of the cold first step.
        step_s: median.
        loss: of the first step on rank 0.
    """

    failed: str = ""
    first_s: float = 0.0
    step_s: float = 0.0
    loss: float = 0.0


def measure_class(asked: Asked, num_ranks: int) -> dict[str, ClassTimes]:
    """By system: cold first steps one system after the other, then steps in turns."""
    times: dict[str, ClassTimes] = {}
    with ExitStack() as stack:
        ranks_of, first_of = {}, {}
        for system in TIMED:
            say_progress(f"{asked.name}: {system}: first step")
            ranks = stack.enter_context(
                Ranks(f"{asked.name}, {system}", num_ranks, ClassTimer, system, asked, timeout_s=TIMEOUT_S)
            )
            try:
                first_of[system] = ranks.call("first_step")
                ranks_of[system] = ranks
            except RuntimeError as error:
                times[system] = ClassTimes(failed=_last_line(error))
        samples: dict[str, list[float]] = {system: [] for system in ranks_of}
        say_progress(f"{asked.name}: steps")
        for _ in range(ROUNDS):
            for system, ranks in ranks_of.items():
                samples[system] += map(max, zip(*ranks.call("turn", RUNS), strict=True))
        for system in ranks_of:
            first_s, step_s = max(s for s, _ in first_of[system]), statistics.median(samples[system])
            times[system] = ClassTimes("", first_s, step_s, first_of[system][0][1])
    return times


def memory_of_class(asked: Asked, num_ranks: int) -> float:
    """Memory of a step with graphshard, as a ratio to eager FSDP2's; 0: one of them failed.

    Of one rank, whose collectives do nothing: what a thread of gloo's frees, torch's profiler does not see.
    """
    peaks = []
    for system in (GRAPHSHARD, FSDP2):
        say_progress(f"{asked.name}: {system}: memory")
        title = f"{asked.name}, {system}, memory"
        with Ranks(title, 1, ClassTimer, system, asked, timeout_s=TIMEOUT_S, pretended=num_ranks) as ranks:
            try:
                ranks.call("first_step")
                peaks += ranks.call("peak_bytes")
            except RuntimeError as error:
                say_progress(_last_line(error))
                return 0.0
    return peaks[0] / peaks[1]


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]


TIMES_HEADER = ("model", "first s: fsdp2+compile", "graphshard", "step: fsdp2", "fsdp2+compile", "graphshard")


def times_cells(name: str, times: dict[str, ClassTimes]) -> tuple[str, ...]:
    """Steps are ratios to the faster of FSDP2's."""
    best_s = best_peer_s(times)
    steps = [f"{t.step_s / best_s:.2f}" if not (t := times[s]).failed and best_s else "-" for s in TIMED]
    firsts = [f"{t.first_s:.1f}" if not (t := times[s]).failed else "-" for s in TIMED[1:]]
    return (name, *firsts, *steps)


def best_peer_s(times: dict[str, ClassTimes]) -> float:
    """Of a step; 0: no peer ran."""
    return min((times[system].step_s for system in TIMED[:2] if not times[system].failed), default=0.0)


def times_lines(all_times: dict[str, dict[str, ClassTimes]]) -> Sequence[str]:
    """What is claimed, and what failed."""
    ran = {name: times for name, times in all_times.items() if not times[GRAPHSHARD].failed}
    ratios = {name: times[GRAPHSHARD].step_s / best for name, times in ran.items() if (best := best_peer_s(times))}
    fast, slow = [r for r in ratios.values() if r <= 0.9], [name for name, r in ratios.items() if r > 1.0]
    return [
        f"step at most 0.90 of the faster FSDP2: {len(fast)} of {len(ratios)}; above 1.00: {', '.join(slow) or 'none'}",
        *(f"{name}, {system}: {t.failed}" for name, of in all_times.items() for system, t in of.items() if t.failed),
        *(
            f"{name}, {system}: ANOTHER LOSS in the first step: {t.loss:.6g}, and {of[FSDP2].loss:.6g}"
            for name, of in all_times.items()
            for system, t in of.items()
            if not t.failed and abs(t.loss - of[FSDP2].loss) > LOSS_BOUND * abs(of[FSDP2].loss)
        ),
    ]
