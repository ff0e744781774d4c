"""Measures first training steps: in fresh processes on an empty Inductor cache, then in fresh ones on that cache."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import graphshard
from bench.compile.samples import FirstStep
from bench.harness.compiler import start_compiler
from bench.harness.disturbance import cpu_seconds
from bench.harness.processes import Ranks
from bench.harness.systems import System, prepare
from bench.harness.variants import check_compiled
from graphshard.compat.compile_phases import timed_graphs, timed_seconds
from graphshard.demo.model import Decoder, ModelConfig
from graphshard.demo.text import Batches

DIM, BATCH_SIZE, SEQ_LEN = 128, 4, 64
TIMEOUT_S = 3600.0


def model_config(blocks: int) -> ModelConfig:
    """The demo's decoder, `DIM` wide, with its proportions: heads of 64, feed-forward layers of 11/4 `DIM`."""
    return ModelConfig(blocks, DIM, DIM // 64, 11 * DIM // 4, SEQ_LEN)


class FirstStepTimer:
    """Measures one case, in a process of its own on each rank."""

    def __init__(self, system: System, blocks: int) -> None:
        start_compiler(system.backend)
        torch.manual_seed(0)
        self._system = system
        self._model = Decoder(model_config(blocks))
        self._forward = prepare(system, self._model)
        self._batches = Batches(dist.get_rank(), dist.get_world_size(), BATCH_SIZE, SEQ_LEN)

    def measure(self) -> FirstStep:
        """Runs the first two steps.

        Raises:
            RuntimeError: if the second step compiled something, or graphshard fell back.
        """
        before_s, graphs, kernels = timed_seconds(), timed_graphs(), _kernels()
        step_s, cpu_s, loss = self._step(0)
        timed_s = {name: seconds - before_s.get(name, 0.0) for name, seconds in timed_seconds().items()}
        graphs = timed_graphs() - graphs
        dist.barrier()
        kernels = _kernels() - kernels
        grad_norm = _grad_norm(self._model)
        first = FirstStep(step_s, cpu_s, 0.0, loss, grad_norm, timed_s, graphs, kernels)
        if self._system.name == "graphshard":
            first = _with_report(first, self._model)
        all_graphs = timed_graphs()
        second_step_s, _, _ = self._step(1)
        if (more := timed_graphs() - all_graphs) > 0:
            raise RuntimeError(f"bench: want nothing to compile after the first step, got {more} more graphs")
        if self._system.name == "graphshard":
            check_compiled("graphshard", self._model)
            if (programs := len(graphshard.report(self._model).programs)) != first.programs:
                raise RuntimeError(f"bench: want {first.programs} programs after two steps, got {programs}")
        return first._replace(second_step_s=second_step_s)

    def _step(self, number: int) -> tuple[float, float, float]:
        """Seconds, processor seconds and the loss."""
        tokens, targets = self._batches.draw(number, 0)
        dist.barrier()
        start_s, start_cpu_s = time.perf_counter(), cpu_seconds()
        loss = self._forward(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return time.perf_counter() - start_s, cpu_seconds() - start_cpu_s, loss.item()


def _with_report(first: FirstStep, model: nn.Module) -> FirstStep:
    report = graphshard.report(model)
    return first._replace(
        joint_passes_s=report.joint_passes_s,
        passes_s=sum(program.passes_s for program in report.programs),
        planner_s=sum(program.planner_s for program in report.programs),
        programs=len(report.programs),
    )


def _kernels() -> int:
    return sum(1 for _ in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.cpp"))


def _grad_norm(model: nn.Module) -> float:
    norms = (torch.linalg.vector_norm(param.grad) for param in model.parameters() if param.grad is not None)
    whole = (norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms)
    return math.hypot(*(norm.item() for norm in whole))


def measure_first_steps(system: System, blocks: int, num_ranks: int, warm: bool) -> dict[str, Sequence[FirstStep]]:
    """First steps of one case by rank: ``"cold"``, and ``"warm"`` where that is wanted.

    Args:
        system: that trains.
        blocks: of the decoder.
        num_ranks: that share a cache.
        warm: whether fresh processes begin once more, on what the cold ones have left in the cache.
    """
    done: dict[str, Sequence[FirstStep]] = {}
    with tempfile.TemporaryDirectory(prefix="graphshard-bench-", ignore_cleanup_errors=True) as folder:
        for state in ("cold", "warm") if warm else ("cold",):
            title, cache = f"{system}, {blocks} blocks, {state}", Path(folder)
            with Ranks(title, num_ranks, FirstStepTimer, system, blocks, timeout_s=TIMEOUT_S, cache=cache) as ranks:
                done[state] = ranks.call("measure")
    return done
