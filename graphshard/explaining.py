"""What was planned for a compiled model, and what its collectives really took: `explain` and `measure`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn

from graphshard.api import need_engine
from graphshard.explain import Explanation
from graphshard.planning.planned_programs import explanation_of
from graphshard.reporting.measuring import measured_programs


def explain(model: nn.Module) -> Explanation:
    """What was decided for each program of a compiled model, and why: print it, or `save` it as page, picture or trace.

    Predicted times are those of the planner's simulator for the hardware that it planned for. What `measure` saw stands
    beside them. Programs are planned when they are compiled: run a step first.

    Args:
        model: compiled by `compile`.

    Raises:
        ValueError: `model` is not compiled.
    """
    context = need_engine(model, "graphshard.explain").context
    return explanation_of(context.planning, context.report)


@contextmanager
def measure(model: nn.Module) -> Iterator[None]:
    """Inside, a profiler sees when each collective of the model's programs is launched and awaited; `explain` shows it.

    Args:
        model: compiled by `compile`, and warm: what is compiled inside counts as a run.

    Torch has one profiler at a time.

    Raises:
        ValueError: `model` is not compiled.
        RuntimeError: a profiler runs around it, or another `measure`; or waits hold the device and not the host.
    """
    engine = need_engine(model, "graphshard.measure")
    kinds = {unit.device.type for unit in engine.units} - {"cpu"}
    if any(f"{kind}:gloo" not in dist.get_backend_config() for kind in kinds):
        raise RuntimeError(
            f"measure: got collectives on {', '.join(kinds)}, whose waits hold the device and not the host, which is "
            "what is timed; want torch.profiler, in whose trace what is computed of each unit bears its name"
        )
    with measured_programs():
        try:
            yield
        finally:  # torch's profiler crashes when it stops while a thread of gloo still runs a collective
            engine.holdings.gathers.settle()
