"""How close two runs must be, agreed over all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from graphshard.demo.train import StepResult

# Largest relative difference of a loss or a gradient norm from eager FSDP2's, by backend. The graphs of `aot_eager` run
# the very operators of eager and sum in FSDP2's order: nothing may differ. Inductor fuses operators and sums in another
# order: a step begins about 1 float32 ulp (1.2e-7) away, and the optimizer carries that on; 3e-7 was the largest seen
# in 12 steps. A gradient that is dropped, doubled or stale moves the loss by 1e-3 and more.
BOUNDS = {"aot_eager": 0.0, "inductor": 1e-5}


@dataclass(frozen=True)
class StepComparison:
    """Steps of several runs with the same number, over all ranks.

    Attributes:
        losses: mean loss over ranks, by run.
        grad_norms: by run.
        difference: largest relative difference from the first run, over runs, ranks, loss and gradient norm.
        bound: the largest difference that passes.
    """

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    difference: float
    bound: float

    @property
    def equal(self) -> bool:
        return self.difference <= self.bound

    @property
    def verdict(self) -> str:
        """`bitwise`, the difference, or a failure."""
        if self.difference == 0:
            return "bitwise"
        return f"within {self.difference:.0e}" if self.equal else f"NO: {self.difference:.0e} > {self.bound:.0e}"


def relative_difference(got: float, want: float) -> float:
    """0 for equal numbers, infinity where either is not finite."""
    if not (math.isfinite(got) and math.isfinite(want)):
        return math.inf
    return abs(got - want) / max(abs(want), 1e-30)


def compare(results: Sequence[StepResult], bound: float) -> StepComparison:
    """Compares the runs of one step with the first of them. A collective: every rank calls it and gets the same."""
    first = results[0]
    difference = max(
        max(relative_difference(run.loss, first.loss), relative_difference(run.grad_norm, first.grad_norm))
        for run in results[1:]
    )
    largest = torch.tensor(difference, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    mean_losses = torch.tensor([run.loss for run in results], dtype=torch.float64) / dist.get_world_size()
    dist.all_reduce(mean_losses)
    return StepComparison(tuple(mean_losses.tolist()), tuple(run.grad_norm for run in results), largest.item(), bound)


def on_all_ranks(passed: bool) -> bool:
    """Whether a check passed on every rank. A collective."""
    failures = torch.tensor(not passed, dtype=torch.int64)
    dist.all_reduce(failures)
    return not failures.item()
