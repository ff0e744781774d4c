"""Chooses the schedule of a program: the fastest of those searched and of those that others would use.

`best_schedule` never returns what its own simulator times slower than FSDP2's schedule, one collective per parameter or
buckets of a fixed size, where these fit the budget.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphshard.planner.baselines import fixed_size_schedule, fsdp2_schedule, per_parameter_schedule
from graphshard.planner.bound import lower_bound_us
from graphshard.planner.problem import Problem
from graphshard.planner.schedule import Schedule
from graphshard.planner.search import searched
from graphshard.planner.simulator import Simulation, simulate

# Of the walks that are as good as the best, so many are simulated.
_COMPARED = 8


@dataclass(frozen=True)
class Choice:
    """A schedule, what it takes, and what it was compared with.

    Attributes:
        name: ``"search"``, or the rival that won.
        rivals: (name, time in us, peak bytes) of FSDP2's schedule, of one collective per parameter, and of buckets of a
            fixed size.
    """

    schedule: Schedule
    simulation: Simulation
    lower_bound_us: float
    name: str
    rivals: tuple[tuple[str, float, int], ...]


class BudgetTooSmall(ValueError):
    """No schedule fits the memory budget."""


def best_schedule(problem: Problem, budget_bytes: int | None = None) -> Choice:
    """The fastest schedule found that allocates at most `budget_bytes`; None: as much as FSDP2's schedule.

    Raises:
        BudgetTooSmall: no schedule was found; says the least that one needs, and which unit needs it.
    """
    rivals = {
        "fsdp2": fsdp2_schedule(problem),
        "per_parameter": per_parameter_schedule(problem),
        "fixed_size": fixed_size_schedule(problem),
    }
    simulations = {name: simulate(problem, schedule) for name, schedule in rivals.items()}
    if budget_bytes is None:
        budget_bytes = simulations["fsdp2"].peak_bytes
    found = dict(rivals)
    for placed in searched(problem, budget_bytes).good()[:_COMPARED]:
        schedule = placed.schedule()
        simulation = simulate(problem, schedule)
        known = simulations.get("search")
        if known is None or (len(schedule.buckets), simulation.peak_bytes) < (
            len(found["search"].buckets),
            known.peak_bytes,
        ):
            found["search"], simulations["search"] = schedule, simulation
    fitting = [name for name, simulation in simulations.items() if simulation.peak_bytes <= budget_bytes]
    if not fitting:
        least = min(simulations, key=lambda name: simulations[name].peak_bytes)
        raise BudgetTooSmall(
            f"memory_budget: got {budget_bytes} bytes for {problem.direction}, want at least "
            f"{simulations[least].peak_bytes}"
        )
    best = min(fitting, key=lambda name: (simulations[name].step_us, simulations[name].peak_bytes, name))
    return Choice(
        found[best],
        simulations[best],
        lower_bound_us(problem),
        best,
        tuple((name, simulations[name].step_us, simulations[name].peak_bytes) for name in rivals),
    )
