"""Accumulation: whether the gradients of micro-batches are reduced one by one, or held whole and reduced once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graphshard.planner.choose import BudgetTooSmall, best_schedule
from graphshard.planner.problem import Problem


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
