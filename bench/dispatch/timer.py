"""What choosing the programs of a step takes, measured inside steps; and what flipping a flag takes.

World size 1, with parameters that are gathered in another dtype: so a gather is a cast, and units are resharded, kept
or held as with many ranks, but nothing communicates.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from bench.dispatch.samples import DispatchTime, FirstFlip
from bench.harness.models import PARAMS_PER_BLOCK, many_parameters
from bench.harness.stack import DEPTH_STRIDE, STACK_DEPTHS
from bench.harness.variants import check_compiled
from graphshard.runtime import program_selection
from graphshard.runtime.program_runner import ProgramRunner

COMPILING_STEPS = 3
SETTLING_STEPS = 3
# What `DispatchTime` calls it -> the functions it is spent in. A forward and a backward call each once.
TIMED: dict[str, tuple[tuple[object, str], ...]] = {
    "bind": ((ProgramRunner, "bind"),),
    "states": ((program_selection, "forward_states"), (program_selection, "backward_states")),
    "look_up": ((program_selection.ProgramSelection, "program"),),
}

SetFlag = Callable[[Any, bool], None]


def _divide(model: Any, on: bool) -> None:
    for block in model.blocks:  # unlike the others, for one unit
        block.set_gradient_divide_factor(3.0 if on else None)


def _prefetch(model: Any, on: bool) -> None:
    blocks = list(model.blocks)
    for block, following in itertools.pairwise(blocks):
        block.set_modules_to_forward_prefetch([following] if on else [])
        following.set_modules_to_backward_prefetch([block] if on else [])


# Setting and setting back. Each case of the first table is one of these settings, left as it is.
FLAGS: dict[str, SetFlag] = {
    "gradients not reduced": lambda model, on: model.set_requires_gradient_sync(not on),
    "not resharded after forward": lambda model, on: model.set_reshard_after_forward(not on),
    "not resharded after backward": lambda model, on: model.set_reshard_after_backward(not on),
    "gradients divided by 3": _divide,
    "prefetches chosen": _prefetch,
}
FLIPPED = tuple(FLAGS)[:-1]
CASES = ("defaults", *FLAGS)


class DispatchTimer:
    """Measures one model, in a process of its own."""

    def __init__(self, backend: str, num_params: int, blocks_per_unit: int) -> None:
        model, self._inputs = many_parameters(num_params, blocks_per_unit)
        mesh = init_device_mesh("cpu", (1,))
        units = num_params // PARAMS_PER_BLOCK // blocks_per_unit
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        self._model: Any = graphshard.compile(
            model, mesh, units=[f"blocks.{i}" for i in range(units)], mp_policy=policy, backend=backend,
            strict=True, reshard_after_forward=True,
        )  # fmt: skip
        self._params = list(model.parameters())
        self._spent = dict.fromkeys(TIMED, 0.0)
        self._depth = 0
        for _ in range(COMPILING_STEPS):
            self._step()
        gc.collect()
        gc.disable()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, functions in TIMED.items():
                for owner, attribute in functions:
                    stack.enter_context(
                        mock.patch.object(owner, attribute, self._timing(name, getattr(owner, attribute)))
                    )
            yield

    def _timing(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        spent, clock = self._spent, time.perf_counter

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += clock() - start

        return timed

    def _step(self, set_flag: SetFlag | None = None, on: bool = False) -> DispatchTime:
        for param in self._params:
            param.grad = None
        for name in self._spent:
            self._spent[name] = 0.0
        begin = time.perf_counter()
        if set_flag is not None:
            set_flag(self._model, on)
        start = time.perf_counter()
        self._model(*self._inputs).backward()
        end = time.perf_counter()
        spent = self._spent
        return DispatchTime(end - start, spent["bind"], spent["states"], spent["look_up"], start - begin)

    def _deep_step(self, set_flag: SetFlag | None = None, on: bool = False) -> DispatchTime:
        """From another depth of the stack each time: see `bench.harness.stack`."""
        self._depth = (self._depth + DEPTH_STRIDE) % STACK_DEPTHS
        return self._deeper(self._depth, set_flag, on)

    def _deeper(self, levels: int, set_flag: SetFlag | None, on: bool) -> DispatchTime:
        return self._step(set_flag, on) if levels == 0 else self._deeper(levels - 1, set_flag, on)

    def case(self, name: str, steps: int) -> list[DispatchTime]:
        """Steps of one case."""
        set_flag = FLAGS.get(name)
        if set_flag is not None:
            set_flag(self._model, True)
        for _ in range(SETTLING_STEPS):
            self._step()
        with self._timed():
            times = [self._deep_step() for _ in range(steps)]
        if set_flag is not None:
            set_flag(self._model, False)
        for _ in range(SETTLING_STEPS):
            self._step()
        check_compiled("graphshard", self._model)
        gc.collect()
        return times

    def first_flip(self, name: str) -> FirstFlip:
        """A flag's first flip, and back; in a process that has not had it yet."""
        ordinary_s = statistics.median(self._step().step_s for _ in range(5))
        report = graphshard.report(self._model)
        programs, regions = len(report.programs), report.regions
        spent_s = sum(self._step(FLAGS[name], on).step_s for on in (True, False))
        report = graphshard.report(self._model)
        new = report.programs[programs:]
        return FirstFlip(
            dict(Counter(program.direction for program in new)),
            report.regions - regions,
            spent_s - 2 * ordinary_s,
            sum(program.passes_s + program.planner_s for program in new),
        )

    def later_flips(self, name: str, steps: int) -> tuple[list[DispatchTime], list[DispatchTime]]:
        """Steps behind a flip, on and off in turns, and the steps that follow them."""
        flipped, still = [], []
        for _ in range(SETTLING_STEPS):
            for on in (True, False):
                self._step(FLAGS[name], on)
                self._step()
        with self._timed():
            for i in range(steps):
                flipped.append(self._deep_step(FLAGS[name], i % 2 == 0))
                still.append(self._deep_step())
        FLAGS[name](self._model, False)
        self._step()
        check_compiled("graphshard", self._model)
        gc.collect()
        return flipped, still
