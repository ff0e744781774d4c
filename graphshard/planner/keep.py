"""What a step keeps: gathered parameters from forward to backward, and gradients that are not reduced at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graphshard.planner.choose import BudgetTooSmall, best_schedule
from graphshard.planner.costs import most_kept_bytes
from graphshard.planner.floor import least_memory
from graphshard.planner.problem import Problem

# Units are kept only where the step falls by more than this part.
_WORTH = 0.001
# So much of a search is enough to compare.
_WALKS = 60


def kept_problems(forward: Problem, backward: Problem, units: frozenset[str]) -> tuple[Problem, Problem]:
    """Both problems when the gathered parameters of `units` stay from forward to backward.

    Forward never frees them. Backward gathers them no more, and holds them up to their last use there. A parameter that
    forward does not gather is gathered in backward all the same.
    """
    kept = {g.fqn: most_kept_bytes(g) for g in forward.gathers if g.unit in units}
    end = len(forward.ops)
    gathers = tuple(replace(g, last_use=end) if g.fqn in kept else g for g in forward.gathers)
    op_bytes = list(backward.op_bytes)
    last_use: dict[str, int] = {}
    for gather in backward.gathers:
        if gather.fqn in kept:
            last_use[gather.fqn] = max(last_use.get(gather.fqn, 0), gather.last_use)
    for fqn, last in last_use.items():
        for position in range(min(last + 1, len(op_bytes))):
            op_bytes[position] += kept[fqn]
    left = tuple(g for g in backward.gathers if g.fqn not in kept)
    return replace(forward, gathers=gathers), replace(backward, gathers=left, op_bytes=tuple(op_bytes))


def choose_kept(forward: Problem, backward: Problem, budget_bytes: int) -> frozenset[str]:
    """The units to keep gathered from forward to backward, if that makes both together faster within the budget.

    Units are taken in the order of what they save for each byte and the time that they hold it: so the last units of
    forward come first. More are kept only while the step falls by more than 0.1 %.
    """
    order = _ordered(forward, backward)
    most = 0
    low, high = 0, len(order)
    while low < high:  # more units never need less memory
        most = (low + high + 1) // 2
        if _fits(*kept_problems(forward, backward, frozenset(order[:most])), budget_bytes):
            low = most
        else:
            high = most - 1
    best, best_us = 0, _step_us(forward, backward, budget_bytes)
    tried = sorted({low, low // 2, low // 4, low // 8, min(low, 1)} - {0})
    for count in tried:
        us = _step_us(*kept_problems(forward, backward, frozenset(order[:count])), budget_bytes)
        if us < best_us * (1.0 - _WORTH):
            best, best_us = count, us
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
        cost[gather.unit] = cost.get(gather.unit, 0.0) + most_kept_bytes(before) * held_us
    return sorted(saved, key=lambda unit: (-saved[unit] / max(cost[unit], 1e-9), unit))


def _fits(forward: Problem, backward: Problem, budget_bytes: int) -> bool:
    return least_memory(forward, budget_bytes).fits and least_memory(backward, budget_bytes).fits


def _step_us(forward: Problem, backward: Problem, budget_bytes: int) -> float:
    """Infinite: one of the two does not fit."""
    try:
        choices = [best_schedule(problem, budget_bytes, walks=_WALKS) for problem in (forward, backward)]
    except BudgetTooSmall:
        return float("inf")
    return sum(choice.simulation.step_us for choice in choices)


@dataclass(frozen=True)
class Accumulation:
    """Whether gradients of micro-batches are reduced one by one or held whole.

    Attributes:
        reduce_each: reduce in every micro-batch and add shards.
        each_us, once_us: backward of all micro-batches for both ways; infinite: does not fit.
        why: in words.
    """

    reduce_each: bool
    each_us: float
    once_us: float
    why: str


def accumulation_choice(backward: Problem, micro_batches: int, budget_bytes: int) -> Accumulation:
    """Compares reducing in each of `micro_batches` backwards with holding full gradients and reducing in the last.

    Held gradients are as large as those that are computed. In the last backward each is free once it is reduced.

    Raises:
        ValueError: there is no micro-batch.
        BudgetTooSmall: neither fits.
    """
    if micro_batches < 1:
        raise ValueError(f"accumulation_choice: micro_batches: got {micro_batches}, want at least 1")
    held = sum(r.grad_bytes for r in backward.reductions)
    without = replace(backward, reductions=(), op_bytes=tuple(num_bytes + held for num_bytes in backward.op_bytes))
    last_bytes = list(backward.op_bytes)
    for reduction in backward.reductions:
        for position in range(min(reduction.ready, len(last_bytes))):
            last_bytes[position] += reduction.grad_bytes
    last = replace(backward, op_bytes=tuple(last_bytes))
    each_us = micro_batches * _backward_us(backward, budget_bytes)
    once_us = _backward_us(last, budget_bytes)
    if micro_batches > 1:
        once_us += (micro_batches - 1) * _backward_us(without, budget_bytes)
    if min(each_us, once_us) == float("inf"):
        best_schedule(backward, budget_bytes)  # says what is too small
    reduce_each = each_us <= once_us
    if once_us == float("inf"):
        why = f"full gradients of {held} bytes do not fit {budget_bytes}"
    else:
        fast, slow = ("each", "once") if reduce_each else ("once", "each")
        why = f"reducing {fast}: {min(each_us, once_us):.1f} us, {slow}: {max(each_us, once_us):.1f} us"
    return Accumulation(reduce_each, each_us, once_us, why)


def _backward_us(problem: Problem, budget_bytes: int) -> float:
    try:
        return best_schedule(problem, budget_bytes).simulation.step_us
    except BudgetTooSmall:
        return float("inf")
