"""Residency: which units stay gathered from forward to backward."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from math import inf
from operator import add, sub

from graphshard.planner.baselines import fsdp2_schedule
from graphshard.planner.bound import lower_bound_us
from graphshard.planner.choose import BudgetTooSmall, best_schedule
from graphshard.planner.coarse import coarsened
from graphshard.planner.costs import most_gathered_bytes
from graphshard.planner.memory_floor import least_memory
from graphshard.planner.problem import Problem
from graphshard.planner.search import COMPARISON_TRIALS
from graphshard.planner.simulator import simulate

# More units stay only where the step falls by more than this part.
_WORTH = 0.001
# Where more units may stay, what each saves matters less, and coarser problems are enough to compare.
_FEW = 8


def with_residency(forward: Problem, backward: Problem, units: frozenset[str]) -> tuple[Problem, Problem]:
    """Both problems when the gathered parameters of `units` stay from forward to backward.

    Forward never frees them. Backward gathers them no more, and holds them up to their last use there. A parameter that
    forward does not gather is gathered in backward all the same.
    """
    resident = {g.fqn: most_gathered_bytes(g) for g in forward.gathers if g.unit in units}
    end = len(forward.ops)
    gathers = tuple(replace(g, last_use=end) if g.fqn in resident else g for g in forward.gathers)
    last_use: dict[str, int] = {}
    for gather in backward.gathers:
        if gather.fqn in resident:
            last_use[gather.fqn] = max(last_use.get(gather.fqn, 0), gather.last_use)
    freed = [0] * (len(backward.op_bytes) + 1)  # behind each op
    for fqn, last in last_use.items():
        freed[min(last, len(backward.op_bytes))] += resident[fqn]
    held = accumulate(freed, sub, initial=sum(freed))
    op_bytes = tuple(map(add, backward.op_bytes, held))
    left = tuple(g for g in backward.gathers if g.fqn not in resident)
    return replace(forward, gathers=gathers), replace(backward, gathers=left, op_bytes=op_bytes)


def fsdp2_peaks(forward: Problem, backward: Problem, units: frozenset[str]) -> dict[str, int]:
    """Bytes that FSDP2's schedules allocate when the gathered parameters of `units` stay, by direction."""
    problems = with_residency(forward, backward, units)
    return {problem.direction: simulate(problem, fsdp2_schedule(problem)).peak_bytes for problem in problems}


def choose_residency(forward: Problem, backward: Problem, budget_bytes: int) -> frozenset[str]:
    """The units that stay gathered from forward to backward, if that makes both together faster within the budget.

    Units are taken in the order of what they save for each byte and the time that they hold it: so the last units of
    forward come first. More stay only while the step falls by more than 0.1 %.
    """
    order = _ordered(forward, backward)
    low, high = 0, len(order)
    most = high  # often all fit
    while low < high:  # more units never need less memory
        if _fits(*with_residency(forward, backward, frozenset(order[:most])), budget_bytes):
            low = most
        else:
            high = most - 1
        most = (low + high + 1) // 2
    coarse = low > _FEW

    def step_us(count: int, most_us: float) -> float:
        """Of so many units; infinite: not below `most_us`."""
        problems = with_residency(forward, backward, frozenset(order[:count]))
        if sum(map(lower_bound_us, problems)) >= most_us:
            return inf
        return _step_us(*problems, budget_bytes, coarse)

    best, best_us = 0, _step_us(forward, backward, budget_bytes, coarse)
    all_us = step_us(low, best_us * (1.0 - _WORTH)) if low else inf
    for count in sorted({low // 2, low // 4, low // 8, min(low, 1)} - {0, low}):
        # Fewer than all that fit, unless all are better than those can be.
        us = step_us(count, min(best_us * (1.0 - _WORTH), all_us / (1.0 - _WORTH)))
        if us < best_us * (1.0 - _WORTH):
            best, best_us = count, us
    if all_us < best_us * (1.0 - _WORTH):
        best = low
    return frozenset(order[:best])


def _ordered(forward: Problem, backward: Problem) -> list[str]:
    saved: dict[str, float] = {}
    cost: dict[str, float] = {}
    in_forward = {g.fqn: g for g in forward.gathers}
    for gather in backward.gathers:
        before = in_forward.get(gather.fqn)
        if before is None:
            continue
        held_us = forward.compute_us - forward.elapsed_us[before.last_use] + backward.elapsed_us[gather.first_use]
        saved[gather.unit] = saved.get(gather.unit, 0.0) + gather.transfer.us(gather.wire_bytes)
        cost[gather.unit] = cost.get(gather.unit, 0.0) + most_gathered_bytes(before) * held_us
    return sorted(saved, key=lambda unit: (-saved[unit] / max(cost[unit], 1e-9), unit))


def _fits(forward: Problem, backward: Problem, budget_bytes: int) -> bool:
    return least_memory(forward, budget_bytes).fits and least_memory(backward, budget_bytes).fits


def _step_us(forward: Problem, backward: Problem, budget_bytes: int, coarse: bool) -> float:
    """Infinite: one of the two does not fit."""
    problems = [coarsened(problem).problem if coarse else problem for problem in (forward, backward)]
    try:
        choices = [best_schedule(problem, budget_bytes, trials=COMPARISON_TRIALS) for problem in problems]
    except BudgetTooSmall:
        return inf
    return sum(choice.simulation.step_us for choice in choices)
