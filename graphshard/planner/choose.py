"""Chooses the schedule of a program: the fastest of those searched and of those that others would use.

`best_schedule` never returns what its own simulator times slower than FSDP2's schedule, one collective per parameter or
buckets of a fixed size, where these fit the budget.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphshard.planner.baselines import fixed_size_schedule, fsdp2_schedule, per_parameter_schedule
from graphshard.planner.bound import lower_bound_us
from graphshard.planner.candidates import ScheduledCandidate
from graphshard.planner.polish import is_small, polished
from graphshard.planner.problem import Problem
from graphshard.planner.schedule import Schedule
from graphshard.planner.search import is_comparison, searched, searched_by_blocks
from graphshard.planner.simulator import Simulation, simulate

# Of the candidates that are as good as the best, so many are simulated.
_COMPARED = 4
# Small problems are polished from so many that differ in their buckets.
_STARTS = 6


@dataclass(frozen=True)
class Choice:
    """A schedule, what it takes, and what it was compared with.

    Attributes:
        name: ``"search"``, or the baseline that won.
        baselines: (name, time in us, peak bytes) of FSDP2's schedule, of one collective per parameter, and of buckets
            of a fixed size.
    """

    schedule: Schedule
    simulation: Simulation
    lower_bound_us: float
    name: str
    baselines: tuple[tuple[str, float, int], ...]


class BudgetTooSmall(ValueError):
    """No schedule fits the memory budget."""


def best_schedule(
    problem: Problem, budget_bytes: int | None = None, reuse_blocks: bool = True, trials: int = 240
) -> Choice:
    """The fastest schedule found that allocates at most `budget_bytes`; None: as much as FSDP2's schedule.

    Args:
        problem: what to plan.
        budget_bytes: most that may be allocated, by the simulator's count.
        reuse_blocks: blocks that repeat are planned once, large problems on a coarser one.
        trials: how many candidates the search tries.

    Raises:
        BudgetTooSmall: no schedule was found; says the least that one needs, and which unit needs it.
    """
    baselines = {
        "fsdp2": fsdp2_schedule(problem),
        "per_parameter": per_parameter_schedule(problem),
        "fixed_size": fixed_size_schedule(problem),
    }
    simulations = {name: simulate(problem, schedule) for name, schedule in baselines.items()}
    if budget_bytes is None:
        budget_bytes = simulations["fsdp2"].peak_bytes
    found = dict(baselines)
    best_found: ScheduledCandidate | None = None
    search = (searched_by_blocks if reuse_blocks else searched)(problem, budget_bytes, trials)
    for candidate in search.good()[:_COMPARED]:
        schedule = candidate.schedule()
        simulation = simulate(problem, schedule)
        known = simulations.get("search")
        if known is None or (len(schedule.buckets), simulation.peak_bytes) < (
            len(found["search"].buckets),
            known.peak_bytes,
        ):
            found["search"], simulations["search"], best_found = schedule, simulation, candidate
    if best_found is not None and not is_comparison(trials):
        safer = search.safer(best_found).schedule()
        if safer != found["search"]:
            found["search"], simulations["search"] = safer, simulate(problem, safer)
    if is_small(problem):
        starts = [found[name] for name, simulation in simulations.items() if simulation.peak_bytes <= budget_bytes]
        for start in (*starts, *(candidate.schedule() for candidate in search.different(_STARTS))):
            moved = polished(problem, start, budget_bytes)
            simulation = simulate(problem, moved)
            if "search" not in simulations or simulation.step_us < simulations["search"].step_us:
                found["search"], simulations["search"] = moved, simulation
    fitting = [name for name, simulation in simulations.items() if simulation.peak_bytes <= budget_bytes]
    if not fitting:
        raise BudgetTooSmall(_too_small(problem, budget_bytes, simulations))
    best = min(fitting, key=lambda name: (simulations[name].step_us, simulations[name].peak_bytes, name))
    return Choice(
        found[best],
        simulations[best],
        lower_bound_us(problem),
        best,
        tuple((name, simulations[name].step_us, simulations[name].peak_bytes) for name in baselines),
    )


def _too_small(problem: Problem, budget_bytes: float, simulations: dict[str, Simulation]) -> str:
    name = min(simulations, key=lambda name: simulations[name].peak_bytes)
    live = simulations[name].live_bytes
    at = live.index(max(live))
    gathered = [g for g in problem.gathers if g.first_use <= at <= g.last_use]
    reduced = [r for r in problem.reductions if at - 1 <= r.ready <= at + 1]
    items = [(g.wire_bytes, g.unit, "gathers") for g in gathered] + [(r.wire_bytes, r.unit, "reduces") for r in reduced]
    units: dict[tuple[str, str], int] = {}
    for num_bytes, unit, what in items:
        units[unit, what] = units.get((unit, what), 0) + num_bytes
    unit, what = max(units, key=lambda key: units[key], default=("", ""))
    place = problem.ops[at] if at < len(problem.ops) else "the end"
    who = f", where unit {unit or 'root'!r} {what} {units[unit, what]} bytes" if units else ""
    return (
        f"memory_budget: got {budget_bytes} bytes for {problem.direction}, want at least {live[at]}: "
        f"that is the least found ({name}), at {place}{who}"
    )
