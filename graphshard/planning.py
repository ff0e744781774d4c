"""Plans the programs of one model: reads the problem off a marked graph, chooses a schedule, keeps what was decided."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch.fx import Graph, GraphModule

from graphshard.compat import resolve_process_group
from graphshard.cost import CostModel, GroupShape, find_hardware, group_shape
from graphshard.extraction import Scene, extract_problem
from graphshard.ir import PassContext
from graphshard.plan import END, Decision, PlannedBucket, PlannedStep, ProgramPlan
from graphshard.planner import (
    Choice,
    Problem,
    Schedule,
    best_schedule,
    choose_kept,
    fsdp2_schedule,
    kept_problems,
    lower_bound_us,
    simulate,
)


@dataclass
class Planning:
    """How the programs of one model are planned.

    Attributes:
        scene: machine and process groups.
        mode: ``"auto"``, or ``"fsdp2"``: schedules are FSDP2's, and are timed only.
        budget_bytes: most that a program may allocate; None: what FSDP2's schedule does.
        keeps: whether it also decides which units stay gathered from forward to backward.
        backward: the backward graph that was partitioned last, until its forward graph has been planned.
    """

    scene: Scene
    mode: str = "auto"
    budget_bytes: int | None = None
    keeps: bool = False
    backward: GraphModule | None = None

    @property
    def fingerprint(self) -> str:
        """A short name of all that shapes a plan besides the graph."""
        return f"{self.mode}-{self.budget_bytes}-{self.keeps}-{self.scene.cost.fingerprint}"

    def take_backward(self) -> GraphModule | None:
        """`backward`, once."""
        backward, self.backward = self.backward, None
        return backward


class RegionPlanning:
    """Plans the programs of one region.

    Args:
        planning: of the model.

    Attributes:
        latest: what was decided last, None if nothing was.
    """

    def __init__(self, planning: Planning) -> None:
        self._planning = planning
        self._step_bytes = 0  # what FSDP2's schedules of forward and backward allocate
        self.latest: Decision | None = None

    def __call__(self, graph: Graph, ctx: PassContext) -> ProgramPlan | None:
        """The plan of one marked graph; None: there is nothing to plan, or FSDP2's order is wanted.

        Raises:
            BudgetTooSmall: no plan fits the budget.
        """
        self.latest = None
        if any(settings.forward_prefetch or settings.backward_prefetch for _, settings in ctx.flags.units):
            return None  # users have chosen
        problem = extract_problem(graph, ctx, self._planning.scene)
        if not problem.gathers and not problem.reductions:
            return None
        fsdp2 = simulate(problem, fsdp2_schedule(problem))
        budget_bytes = self._planning.budget_bytes or max(fsdp2.peak_bytes, self._step_bytes)
        if self._planning.mode == "fsdp2":
            choice = Choice(fsdp2_schedule(problem), fsdp2, lower_bound_us(problem), "fsdp2", ())
        else:
            choice = best_schedule(problem, budget_bytes)
        plan = named_plan(problem, choice.schedule)
        self.latest = Decision(problem, choice, plan, budget_bytes)
        return plan if self._planning.mode == "auto" else None

    def keep_units(
        self, forward: tuple[Graph, PassContext], backward: tuple[Graph, PassContext], by_default: frozenset[str]
    ) -> frozenset[str] | None:
        """Names of the units that stay gathered from forward to backward; None: FSDP2's flags say.

        Args:
            forward: marked graph, and its context.
            backward: the same.
            by_default: units that stay in FSDP2.
        """
        if self._planning.mode == "fsdp2":
            return None
        ahead, back = (extract_problem(graph, ctx, self._planning.scene) for graph, ctx in (forward, backward))
        as_in_fsdp2 = kept_problems(ahead, back, by_default)
        self._step_bytes = max(simulate(problem, fsdp2_schedule(problem)).peak_bytes for problem in as_in_fsdp2)
        if not self._planning.keeps:
            return None
        return choose_kept(ahead, back, self._planning.budget_bytes or self._step_bytes)


def named_plan(problem: Problem, schedule: Schedule) -> ProgramPlan:
    """A schedule in names: buckets by the units that they are of, members by FQN, positions by node."""
    names: Counter[str] = Counter()
    buckets = []
    for number, bucket in enumerate(schedule.buckets):
        members = schedule.members(problem, number)
        units = list(dict.fromkeys(member.unit or "root" for member in members))
        name = f"{bucket.kind}:{units[0]}" + (f"..{units[-1]}" if len(units) > 1 else "")
        names[name] += 1
        suffix = f"#{names[name]}" if names[name] > 1 else ""
        buckets.append(PlannedBucket(name + suffix, bucket.kind, tuple(member.fqn for member in members)))
    ends = (*problem.ops, END)
    steps = (PlannedStep(ends[at], step, buckets[number].name) for at, step, number in schedule.actions)
    return ProgramPlan(tuple(buckets), tuple(steps))


PLANS = ("auto", "fsdp2")
_ACCELERATORS = {"A100": "a100", "H100": "h100", "H200": "h200", "B200": "b200"}


def make_planning(
    plan: str, memory_budget: int | float | None, hardware: str | None, device_type: str, fused: bool, keeps: bool
) -> Planning:
    """What `graphshard.compile` plans with.

    Args:
        plan: one of `PLANS`.
        memory_budget: most that a program may allocate: bytes, or a share, in (0, 1], of a rank's memory.
        hardware: name of a row of the hardware table, or path of a calibration; None: found by the device.
        device_type: that the model runs on.
        fused: whether Inductor compiles the programs.
        keeps: whether the planner decides which units stay gathered.

    Raises:
        TypeError: `memory_budget` is no number.
        ValueError: an argument is not one of those above.
    """
    machine = find_hardware(hardware or detect_hardware(device_type))
    budget_bytes = None if memory_budget is None else _budget_bytes(memory_budget, machine.memory_bytes)
    return Planning(Scene(CostModel(machine, fused), _group_shape(machine.ranks_per_node)), plan, budget_bytes, keeps)


def detect_hardware(device_type: str) -> str:
    """The row of the hardware table for the device that this process runs on: ``"h100"`` for one that it lacks."""
    if device_type == "cpu":
        return "cpu-gloo"
    name = torch.cuda.get_device_name() if device_type == "cuda" and torch.cuda.is_available() else ""
    return next((row for part, row in _ACCELERATORS.items() if part in name), "h100")


def _budget_bytes(memory_budget: int | float, memory_bytes: int) -> int:
    if isinstance(memory_budget, bool) or not isinstance(memory_budget, (int, float)):
        raise TypeError(f"compile: memory_budget: got {memory_budget!r:.80}, want bytes, a share of memory or None")
    if isinstance(memory_budget, float) and 0.0 < memory_budget <= 1.0:
        return int(memory_budget * memory_bytes)
    if not math.isfinite(memory_budget) or memory_budget < 1 or memory_budget != int(memory_budget):
        raise ValueError(
            f"compile: memory_budget: got {memory_budget}, want bytes, as an int, or a share in (0, 1] of a rank's "
            "memory, as a float"
        )
    return int(memory_budget)


def _group_shape(ranks_per_node: int) -> Callable[[str], GroupShape]:
    @cache
    def shape(name: str) -> GroupShape:
        ranks = dist.get_process_group_ranks(resolve_process_group(name))
        return group_shape(ranks, ranks_per_node)

    return shape
