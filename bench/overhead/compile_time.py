"""Seconds of the first step, in which everything is compiled, and how many of them are graphshard's passes'.

Each case has fresh processes, two gloo ranks as a rule: with one rank there would be no collectives to place. Both
ranks compile at the same time.
"""

from __future__ import annotations

import os
import time

import torch.distributed as dist

import graphshard
from bench.harness.compiler import start_compiler
from bench.harness.models import decoder
from bench.harness.processes import Ranks
from bench.harness.variants import Variant, check_compiled, prepare
from bench.overhead.samples import CompileTime

TIMEOUT_S = 1800.0


class CompileTimer:
    """Measures one case, in a process of its own on each rank."""

    def __init__(self, variant: Variant, backend: str, num_layers: int) -> None:
        start_compiler(backend)
        self._variant = variant
        self._model, self._inputs = decoder(num_layers)
        self._forward = prepare(variant, self._model, backend)

    def measure(self) -> CompileTime:
        """Runs the first two steps.

        Raises:
            RuntimeError: if the second step compiled something.
        """
        first_s, cpu_s = self._step()
        programs = self._programs()
        second_s, _ = self._step()
        check_compiled(self._variant, self._model)
        if self._programs() != programs:
            raise RuntimeError(f"bench: want {programs} programs after two steps, got {self._programs()}")
        if not self._is_graphshard:
            return CompileTime(first_s, cpu_s, second_s)
        report = graphshard.report(self._model)
        passes_s = report.joint_passes_s + sum(program.passes_s for program in report.programs)
        return CompileTime(first_s, cpu_s, second_s, passes_s, report.regions, programs)

    @property
    def _is_graphshard(self) -> bool:
        return self._variant.startswith("graphshard")

    def _programs(self) -> int:
        return len(graphshard.report(self._model).programs) if self._is_graphshard else 0

    def _step(self) -> tuple[float, float]:
        """Seconds, and processor seconds."""
        dist.barrier()
        start_s, start_cpu_s = time.perf_counter(), _cpu_s()
        self._forward(*self._inputs).backward()  # type: ignore[no-untyped-call]
        return time.perf_counter() - start_s, _cpu_s() - start_cpu_s


def _cpu_s() -> float:
    """Processor seconds of this process and of those that it ran to the end."""
    return sum(os.times()[:4])


def measure_compile(variant: Variant, backend: str, num_layers: int, num_ranks: int) -> list[CompileTime]:
    """One case, by rank."""
    title = f"{variant}, {backend}, {num_layers} layers"
    with Ranks(title, num_ranks, CompileTimer, variant, backend, num_layers, timeout_s=TIMEOUT_S) as ranks:
        return ranks.call("measure")
