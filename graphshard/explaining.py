"""What was planned for a compiled model, and what its collectives really took: `explain` and `measure`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from graphshard.api import need_engine
from graphshard.explain import Explanation, PlannedProgram
from graphshard.reporting.measuring import measured_programs
from graphshard.reporting.report import ProgramRecord


def explain(model: nn.Module) -> Explanation:
    """What was decided for each program of a compiled model, and why: print it, or `save` it as page, picture or trace.

    Predicted times are those of the planner's simulator for the hardware that it planned for. What `measure` saw stands
    beside them. Programs are planned when they are compiled: run a step first.

    Args:
        model: compiled by `compile`.

    Raises:
        ValueError: `model` is not compiled.
    """
    engine = need_engine(model, "graphshard.explain")
    planning = engine.context.planning
    programs, notes = [], []
    for record in engine.context.report.programs:
        planned = _planned(record, planning.mode if planning is not None else "fsdp2")
        if planned is not None:
            programs.append(planned)
    if not programs:
        notes.append("no program has been planned yet: run a step")
    if not any(program.measured for program in programs):
        notes.append(
            "times are predicted; `with graphshard.measure(model):` around some steps puts measured ones beside"
        )
    hardware = planning.scene.cost.hardware.name if planning is not None else "none"
    return Explanation(
        tuple(programs), hardware, (*notes, *engine.context.report.fallbacks, *engine.context.report.notes)
    )


def _planned(record: ProgramRecord, plan: str) -> PlannedProgram | None:
    decision = record.decision
    if decision is None:
        return None
    flags = "" if record.flags == "default" else f" [{record.flags}]"
    return PlannedProgram(
        f"region {record.region} {record.direction}{flags}",
        decision.problem,
        decision.choice.schedule,
        decision.choice.simulation,
        decision.choice.lower_bound_us,
        plan,
        tuple(bucket.name for bucket in decision.plan.buckets),
        decision.choice.baselines,
        decision.budget_bytes,
        record.timings or None,
    )


@contextmanager
def measure(model: nn.Module) -> Iterator[None]:
    """Inside, a profiler sees when each collective of the model's programs is launched and awaited; `explain` shows it.

    Args:
        model: compiled by `compile`, and warm: what is compiled inside counts as a run.

    Torch has one profiler at a time.

    Raises:
        ValueError: `model` is not compiled.
        RuntimeError: a profiler runs around it, or another `measure`.
    """
    engine = need_engine(model, "graphshard.measure")
    with measured_programs():
        try:
            yield
        finally:  # torch's profiler crashes when it stops while a thread of gloo still runs a collective
            engine.holdings.gathers.settle()
