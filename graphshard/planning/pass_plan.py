"""What is gathered and reduced between the regions of a pass, planned as one problem (`planner/regions.py`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch.fx import Graph, Node

from graphshard.graph.ir import PassContext, is_call, is_tangent, output_args
from graphshard.graph.liveness import allocations_of, bytes_of
from graphshard.graph.markers import UNSHARD
from graphshard.planner import BudgetTooSmall, GatherTask, Problem, ReductionTask, RegionRun, pass_problem
from graphshard.planning.plan_cache import remembered_schedule

# Less is not worth a word.
_SHOWN_MS = 0.05


class PlannedGather(NamedTuple):
    """Units that are gathered together.

    Attributes:
        launch: the run of a region before which that is launched.
        units: (name, the run that needs it) of each.
    """

    launch: int
    units: tuple[tuple[str, int], ...]


class PlannedReduction(NamedTuple):
    """Units that are reduced together, behind the runs before `launch`, and awaited behind those before `wait`."""

    launch: int
    wait: int
    units: tuple[str, ...]


@dataclass(frozen=True)
class PassPlan:
    """Both, in order of launch.

    Attributes:
        predicted_us: time of the pass, by the simulator.
        one_ahead_us: the same, if each unit was gathered alone, one ahead, and reduced alone.
    """

    gathers: tuple[PlannedGather, ...]
    reductions: tuple[PlannedReduction, ...]
    predicted_us: float = 0.0
    one_ahead_us: float = 0.0

    def __str__(self) -> str:
        if not self.gathers and not self.reductions:
            return "between regions, nothing is gathered or reduced"
        told = []
        for groups, what in ((self.gathers, "gathered"), (self.reductions, "reduced")):
            if groups:
                units = sum(len(group.units) for group in groups)
                told.append(f"{units} units {what} in {len(groups)} collectives")
        saved_ms = (self.one_ahead_us - self.predicted_us) / 1e3
        saved = f", {saved_ms:.1f} ms less than one unit at a time, as predicted" if saved_ms >= _SHOWN_MS else ""
        return f"between regions, {', '.join(told)}{saved}"

    def text(self) -> str:
        """All of it, in one line."""
        return json.dumps([self.gathers, self.reductions, self.predicted_us, self.one_ahead_us])

    @staticmethod
    def parse(text: str) -> PassPlan:
        """What `text` returned."""
        gathers, reductions, predicted_us, one_ahead_us = json.loads(text)
        return PassPlan(
            tuple(PlannedGather(at, tuple((name, run) for name, run in units)) for at, units in gathers),
            tuple(PlannedReduction(at, wait, tuple(units)) for at, wait, units in reductions),
            predicted_us,
            one_ahead_us,
        )


def region_run(graph: Graph, ctx: PassContext, problem: Problem) -> RegionRun:
    """One run of a region, as far as its marked graph shows; `problem`: of it."""
    return RegionRun(problem, _kept_bytes(graph, ctx))


def _kept_bytes(graph: Graph, ctx: PassContext) -> int:
    allocations = allocations_of(graph)
    if ctx.direction == "backward":
        taken = [
            node for node in graph.find_nodes(op="placeholder") if node.name not in ctx.params and not is_tangent(node)
        ]
        return -sum(bytes_of(found) for node in taken for found in allocations[node])
    if ctx.direction != "forward":
        return 0
    left = {found for node in output_args(graph) if isinstance(node, Node) for found in allocations[node]}
    return sum(bytes_of(found) for found in left if found.node.op != "placeholder" and not is_call(found.node, UNSHARD))


def plan_pass(
    runs: Sequence[RegionRun],
    gathers: Sequence[Mapping[str, tuple[tuple[str, ...], int | None]]],
    reductions: Sequence[frozenset[str]],
    budget_bytes: int | None,
) -> PassPlan | None:
    """The fastest plan found; None: nothing fits.

    Args:
        runs: of regions, in order, as `region_run` makes them.
        gathers: of each, see `RegionRun`.
        reductions: of each, likewise.
        budget_bytes: most that may be allocated, what is kept for backward included; None: what it is if each unit is
            gathered alone, one ahead.
    """
    problem = pass_problem(
        [
            replace(run, gathers=own, reductions=reduced)
            for run, own, reduced in zip(runs, gathers, reductions, strict=True)
        ]
    )
    if not problem.gathers and not problem.reductions:
        return PassPlan((), ())
    try:
        choice = remembered_schedule(problem, budget_bytes)
    except BudgetTooSmall:
        return None
    schedule = choice.schedule
    at: dict[tuple[int, str], int] = {(step.bucket, step.kind): step.before for step in schedule.steps}
    planned_gathers, planned_reductions = [], []
    for number, bucket in enumerate(schedule.buckets):
        launch, members = at[number, "launch"], schedule.members(problem, number)
        if bucket.kind == "gather":
            needs = [(member.unit, member.first_use) for member in members if isinstance(member, GatherTask)]
            planned_gathers.append(PlannedGather(launch, tuple(needs)))
        else:
            units = tuple(member.unit for member in members if isinstance(member, ReductionTask))
            planned_reductions.append(PlannedReduction(launch, at[number, "wait"], units))
    one_ahead_us = next(us for name, us, _ in choice.baselines if name == "fsdp2")
    return PassPlan(tuple(planned_gathers), tuple(planned_reductions), choice.simulation.step_us, one_ahead_us)
