"""Rows of `bench.schedule`: what each system's schedule of one program takes, on one simulator."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.harness.tables import align
from bench.schedule import torch_overlap
from bench.schedule.cases import Case, CaseProgram
from graphshard.planner import (
    BudgetTooSmall,
    Problem,
    Schedule,
    Simulation,
    best_schedule,
    fixed_size_schedule,
    fsdp2_schedule,
    lower_bound_us,
    per_parameter_schedule,
    simulate,
)
from graphshard.scale.resize import program_on

OURS, TORCH = "graphshard", "torch_overlap"
BASELINES: Mapping[str, Callable[[Problem], Schedule]] = {
    "fsdp2": fsdp2_schedule,
    "per_parameter": per_parameter_schedule,
    "fixed_500mb": fixed_size_schedule,
}
SYSTEMS = (OURS, *BASELINES, TORCH)
# Relative; two simulations of one schedule differ by the order of floating-point sums.
_SAME = 1e-9


@dataclass(frozen=True)
class ScheduleRow:
    """One system's schedule of one program.

    Attributes:
        case: model, ranks and budget, such as ``"llama3-8b/w64/80gb"``.
        direction: ``"forward"`` or ``"backward"``.
        system: one of `SYSTEMS`.
        time_us: None, as the other two numbers: there is no schedule.
        lower_bound_us: no schedule of the program takes less.
        exposed_us: time in which the computation waits.
        peak_bytes: most that is allocated; only graphshard plans within the budget.
        budget_bytes: most that the program may allocate; below 0: the states alone take more.
        reason: why there is no schedule, ``""`` where there is one.
    """

    case: str
    direction: str
    system: str
    time_us: float | None
    lower_bound_us: float
    exposed_us: float | None
    peak_bytes: int | None
    budget_bytes: int
    reason: str = ""

    @property
    def ratio(self) -> float | None:
        """Time over lower bound."""
        return None if self.time_us is None else self.time_us / self.lower_bound_us

    @property
    def fits(self) -> bool:
        """Whether there is a schedule, and it fits the budget."""
        return self.time_us is not None and (self.peak_bytes or 0) <= self.budget_bytes


def case_rows(case: Case, budgets: Mapping[str, int], systems: Sequence[str]) -> list[ScheduleRow]:
    """The rows of one case.

    Args:
        case: model and ranks.
        budgets: bytes that a program may allocate, by name.
        systems: of `SYSTEMS`.
    """
    rows = []
    for planned in case.programs:
        problem = planned.problem
        bound_us = lower_bound_us(problem)
        found = {name: simulate(problem, BASELINES[name](problem)) for name in systems if name in BASELINES}
        by_torch = _by_torch(case, planned) if TORCH in systems else ""
        for budget, budget_bytes in budgets.items():
            for system in systems:
                if system == OURS:
                    simulation, reason = _planned(problem, budget_bytes)
                elif system == TORCH:
                    simulation, reason = (None, by_torch) if isinstance(by_torch, str) else (by_torch, "")
                else:
                    simulation, reason = found[system], ""
                rows.append(
                    ScheduleRow(
                        f"{case.name}/{budget}",
                        problem.direction,
                        system,
                        simulation and simulation.step_us,
                        bound_us,
                        simulation and simulation.exposed_us,
                        simulation and simulation.peak_bytes,
                        budget_bytes,
                        reason,
                    )
                )
    return rows


def _planned(problem: Problem, budget_bytes: int) -> tuple[Simulation | None, str]:
    if budget_bytes <= 0:
        return None, "the states alone take more than the budget"
    try:
        return best_schedule(problem, budget_bytes).simulation, ""
    except BudgetTooSmall as error:
        return None, str(error)


def _by_torch(case: Case, planned: CaseProgram) -> Simulation | str:
    """What torch's pass makes of a program, or why there is nothing."""
    if (reason := torch_overlap.refusal()) is not None:
        return reason
    graph, ctx = program_on(case.deep_program(planned), case.layout)
    try:
        found = torch_overlap.overlapped(graph, ctx, planned.scene)
    except Exception as error:  # the pass is private, and another's: whatever it raises is its row
        return f"{type(error).__name__}: {error}"
    return simulate(found.problem, found.schedule)


@dataclass(frozen=True)
class ScheduleSummary:
    """What the rows say of graphshard.

    Attributes:
        median_ratio, worst_ratio: of its time to the lower bound.
        worst_case: where that is.
        beaten: (row of graphshard's, row of the peer's) wherever a peer that fits the budget is faster.
        compared: how often a peer fits the budget.
    """

    median_ratio: float
    worst_ratio: float
    worst_case: str
    beaten: tuple[tuple[ScheduleRow, ScheduleRow], ...]
    compared: int


def summary(rows: Sequence[ScheduleRow]) -> ScheduleSummary | None:
    """None: no schedule is graphshard's."""
    ours = {(row.case, row.direction): row for row in rows if row.system == OURS}
    ratios = {key: row.ratio for key, row in ours.items() if row.ratio is not None}
    if not ratios:
        return None
    peers = [row for row in rows if row.system != OURS and row.fits and (row.case, row.direction) in ours]
    beaten = []
    for peer in peers:
        mine = ours[peer.case, peer.direction]
        if mine.time_us is None or (peer.time_us or 0.0) < mine.time_us * (1.0 - _SAME):
            beaten.append((mine, peer))
    worst = max(ratios, key=ratios.__getitem__)
    return ScheduleSummary(
        statistics.median(ratios.values()), ratios[worst], " ".join(worst), tuple(beaten), len(peers)
    )


def schedule_table(rows: Sequence[ScheduleRow]) -> list[str]:
    """All rows."""
    header = ("case", "direction", "system", "time ms", "/ bound", "exposed ms", "peak GiB", "of budget", "")
    return align(header, [_cells(row) for row in rows])


def _cells(row: ScheduleRow) -> tuple[str, ...]:
    start = (row.case, row.direction, row.system)
    budget = f"{row.budget_bytes / 2**30:,.2f}"
    if row.time_us is None or row.exposed_us is None or row.peak_bytes is None:
        return (*start, "-", "-", "-", "-", budget, row.reason)
    return (
        *start,
        f"{row.time_us / 1e3:,.2f}",
        f"{row.ratio:.3f}",
        f"{row.exposed_us / 1e3:,.2f}",
        f"{row.peak_bytes / 2**30:,.2f}",
        budget,
        "" if row.fits else "over",
    )


def summary_lines(rows: Sequence[ScheduleRow]) -> list[str]:
    """What the rows say of graphshard, and of each system."""
    found = summary(rows)
    if found is None:
        return ["graphshard: no schedule"]
    lines = [
        f"graphshard: time / lower bound: median {found.median_ratio:.3f}, worst {found.worst_ratio:.3f} "
        f"({found.worst_case})",
        f"graphshard above a peer that fits the budget: {len(found.beaten)} of {found.compared}; wanted: 0",
    ]
    for mine, peer in found.beaten:
        ours = "none" if mine.ratio is None else f"{mine.ratio:.4f}"
        lines.append(f"  {mine.case} {mine.direction}: {ours}, {peer.system} {peer.ratio:.4f}")
    for system in dict.fromkeys(row.system for row in rows if row.system != OURS):
        ratios = [row.ratio for row in rows if row.system == system and row.ratio is not None]
        fitting = sum(row.fits for row in rows if row.system == system)
        missing = sum(row.system == system and row.time_us is None for row in rows)
        numbers = f"median {statistics.median(ratios):.3f}, worst {max(ratios):.3f}" if ratios else "none"
        lines.append(
            f"{system}: time / lower bound: {numbers}; {fitting} of {len(ratios)} fit the budget"
            + (f"; {missing} without a schedule" if missing else "")
        )
    return lines
