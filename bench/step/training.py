"""Seconds and memory of whole training steps: forward, backward, AdamW, gradients set to None.

Each system has fresh processes, one per rank. They are started and compiled one system after the other; then the
systems take turns, some steps each, so that whatever else slows the machine slows them all. In a step of some number
all systems read the same text.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import graphshard
from bench.harness.compiler import start_compiler
from bench.harness.processes import Ranks
from bench.harness.stack import DEPTH_STRIDE, STACK_DEPTHS, deeper
from bench.harness.systems import System, prepare
from bench.harness.variants import check_compiled
from bench.step.models import sizes_of, trained_decoder
from bench.step.resident import give_back_freed, peak_bytes, reset_peak, resident_bytes
from bench.step.samples import FirstSteps, TrainingTurn
from graphshard.demo.text import Batches
from graphshard.testing.launches import count_launches

LEARNING_RATE = 1e-3
SETTLING_STEPS = 2
WAKING_STEPS = 2
TIMEOUT_S = 1800.0
# What `torch.compile` puts into the FQNs of a module.
COMPILED = "_orig_mod."


class TrainingTimer:
    """Trains with one system, in a process of its own on each rank."""

    def __init__(self, system: System, model_name: str) -> None:
        if system.backend != "eager":
            start_compiler(system.backend)
        sizes = sizes_of(model_name)
        self._system = system
        self._model = trained_decoder(model_name)
        self._forward = prepare(system, self._model)
        # Of AdamW's ways the one with the least work for the host, which is the same for every system.
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, fused=True)
        self._batches = Batches(dist.get_rank(), dist.get_world_size(), sizes.batch_size, sizes.config.max_seq_len)
        self._steps = 0
        self._depth = 0
        self._loss = math.nan
        self._programs = 0

    def first_steps(self) -> FirstSteps:
        """Compiles, and looks at what is computed and launched.

        Raises:
            RuntimeError: if graphshard's report does not count the collectives that the profiler sees.
        """
        norms: dict[str, float] = {}
        first_step_s = self._step(lambda: norms.update(self._grad_norms()))
        loss = self._loss
        if self._is_graphshard:
            graphshard.report(self._model).reset_counts()
        with count_launches() as launches:
            self._step()
        self._check_launches(launches)
        for _ in range(SETTLING_STEPS):
            self._step()
        self._programs = self._count_programs()
        gc.collect()
        gc.disable()
        give_back_freed()  # what compiling needed
        return FirstSteps(first_step_s, loss, norms, launches)

    def turn(self, runs: int) -> TrainingTurn:
        """Some steps; those in which the process wakes up are not timed."""
        is_of_turn, idle_rss_bytes = reset_peak(), resident_bytes()
        steps_s = []
        for _ in range(WAKING_STEPS + runs):
            self._depth = (self._depth + DEPTH_STRIDE) % STACK_DEPTHS
            steps_s.append(deeper(self._depth, self._step))
        turn = TrainingTurn(steps_s[WAKING_STEPS:], idle_rss_bytes, peak_bytes(), is_of_turn, self._loss)
        gc.collect()
        give_back_freed()  # the waking steps of the next turn take it again
        return turn

    def check_programs(self) -> None:
        """Raises:
        RuntimeError: if something was compiled between the timed steps, or not compiled at all.
        """
        if self._is_graphshard:
            check_compiled("graphshard", self._model)
        if self._count_programs() != self._programs:
            raise RuntimeError(f"bench: want {self._programs} programs after all steps, got {self._count_programs()}")

    @property
    def _is_graphshard(self) -> bool:
        return self._system.name == "graphshard"

    def _count_programs(self) -> int:
        return len(graphshard.report(self._model).programs) if self._is_graphshard else 0

    def _step(self, inspect_grads: Callable[[], None] | None = None) -> float:
        """Seconds, without those of `inspect_grads`."""
        tokens, targets = self._batches.draw(self._steps, 0)
        self._steps += 1
        dist.barrier()
        start_s = time.perf_counter()
        loss = self._forward(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        inspected_s = 0.0
        if inspect_grads is not None:
            before_s = time.perf_counter()
            inspect_grads()
            inspected_s = time.perf_counter() - before_s
        self._optimizer.step()
        self._optimizer.zero_grad()
        end_s = time.perf_counter()
        self._loss = loss.item()
        return end_s - start_s - inspected_s

    def _grad_norms(self) -> dict[str, float]:
        """By FQN in the model as it was."""
        norms = {}
        for name, param in self._model.named_parameters():
            if param.grad is not None:
                norm = torch.linalg.vector_norm(param.grad)
                norms[name.replace(COMPILED, "")] = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        return norms

    def _check_launches(self, launches: dict[str, int]) -> None:
        if not self._is_graphshard:
            return
        reported = graphshard.report(self._model).collectives
        if any(reported.get(kind, 0) != count for kind, count in launches.items()):
            raise RuntimeError(f"bench: graphshard reports {reported} in a step, want what is launched: {launches}")


@dataclass
class Measured:
    """What one system did, by rank.

    Attributes:
        first: before the turns.
        turns: in order; each by rank.
    """

    first: list[FirstSteps]
    turns: list[list[TrainingTurn]] = field(default_factory=list)


def processes(model_name: str, system: System, num_ranks: int, caches: Path | None) -> Ranks:
    """Those that train a model with a system; they begin to compile in their first steps."""
    title, cache = f"{model_name}, {system}", None if caches is None else caches / str(system).replace(" ", "_")
    return Ranks(title, num_ranks, TrainingTimer, system, model_name, timeout_s=TIMEOUT_S, cache=cache)


def train(
    model_name: str,
    compared: Sequence[System],
    num_ranks: int,
    runs: int,
    rounds: int,
    say_progress: Callable[[str], None],
    caches: Path | None = None,
) -> dict[System, Measured]:
    """Trains one model with every system.

    Args:
        model_name: of `bench.step.models.sizes_of`.
        compared: at least one system.
        num_ranks: processes of each system.
        runs: timed steps of a turn.
        rounds: turns of each system.
        say_progress: is told what begins.
        caches: has a folder of Inductor's cache for each system; None: new ones, which go with the processes.
    """
    with ExitStack() as stack:
        ranks, done = {}, {}
        for system in compared:  # not at the same time: the first step's seconds are a result
            say_progress(f"{model_name}: {system}: first step")
            ranks[system] = stack.enter_context(processes(model_name, system, num_ranks, caches))
            done[system] = Measured(ranks[system].call("first_steps"))
        for i in range(rounds):
            say_progress(f"{model_name}: round {i + 1} of {rounds}")
            first = i % len(compared)
            for system in (*compared[first:], *compared[:first]):
                done[system].turns.append(ranks[system].call("turn", runs))
        for system in compared:
            ranks[system].call("check_programs")
    return done
