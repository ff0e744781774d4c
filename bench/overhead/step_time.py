"""Host time of one training step: forward, then backward, without an optimizer.

Each variant has a process of its own, world size 1: what is measured is what hooks, guards and dispatch cost, not
communication. The processes take turns, a few steps each, so that whatever else slows the machine slows them all.
"""

from __future__ import annotations

import gc
import math
import time
from contextlib import ExitStack
from typing import NamedTuple

from torch.distributed.tensor import DTensor

from bench.harness.models import many_parameters
from bench.harness.processes import Ranks
from bench.harness.stack import DEPTH_STRIDE, STACK_DEPTHS, deeper
from bench.harness.variants import REFERENCE, VARIANTS, Variant, check_compiled, prepare
from bench.overhead.samples import StepTime

COMPILING_STEPS = 3
WAKING_STEPS = 2
STEPS_PER_TURN = 5
TIMEOUT_S = 900.0
# Relative: float32 sums in another order, nothing more. A variant that computes something else would fail by far.
TOLERANCE = 1e-3


class Evidence(NamedTuple):
    """What a variant computed: all must agree."""

    loss: float
    grad_norm: float


class StepTimer:
    """Measures one variant, in a process of its own."""

    def __init__(self, variant: Variant, backend: str, num_params: int) -> None:
        self._variant = variant
        self._model, self._inputs = many_parameters(num_params)
        self._forward = prepare(variant, self._model, backend)
        self._params = list(self._model.parameters())
        self._depth = 0
        for _ in range(COMPILING_STEPS):
            self._step()
        gc.collect()
        gc.disable()

    def _step(self) -> StepTime:
        for param in self._params:
            param.grad = None
        start = time.perf_counter()
        loss = self._forward(*self._inputs)
        middle = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        end = time.perf_counter()
        self._loss = loss.item()
        return StepTime(middle - start, end - middle)

    def evidence(self) -> Evidence:
        """Of the last step."""
        check_compiled(self._variant, self._model)
        total = 0.0
        for param in self._params:
            grad = param.grad
            assert grad is not None
            total += (grad.full_tensor() if isinstance(grad, DTensor) else grad).square().sum().item()
        return Evidence(self._loss, math.sqrt(total))

    def turn(self) -> list[StepTime]:
        """A few steps; those in which the process wakes up are not counted."""
        steps = []
        for _ in range(WAKING_STEPS + STEPS_PER_TURN):
            self._depth = (self._depth + DEPTH_STRIDE) % STACK_DEPTHS
            steps.append(deeper(self._depth, self._step))
        gc.collect()
        return steps[WAKING_STEPS:]


def check_evidence(evidence: dict[Variant, Evidence]) -> None:
    """Checks that all variants computed the same.

    Raises:
        RuntimeError: naming the first that did not.
    """
    want = evidence[REFERENCE]
    for variant, got in evidence.items():
        if not all(math.isclose(*pair, rel_tol=TOLERANCE) for pair in zip(got, want, strict=True)):
            raise RuntimeError(f"bench: {variant}: got {got}, want that of {REFERENCE}: {want}")


def measure_steps(backend: str, num_params: int, turns: int) -> dict[Variant, list[StepTime]]:
    """Steps of every variant."""
    with ExitStack() as stack:
        ranks = {  # they compile at the same time, which is not timed
            variant: stack.enter_context(
                Ranks(f"{variant}, {backend}", 1, StepTimer, variant, backend, num_params, timeout_s=TIMEOUT_S)
            )
            for variant in VARIANTS
        }
        check_evidence({variant: one.call("evidence")[0] for variant, one in ranks.items()})
        steps: dict[Variant, list[StepTime]] = {variant: [] for variant in VARIANTS}
        for turn in range(turns):
            order = VARIANTS[turn % len(VARIANTS) :] + VARIANTS[: turn % len(VARIANTS)]
            for variant in order:
                steps[variant] += ranks[variant].call("turn")[0]
    return steps
