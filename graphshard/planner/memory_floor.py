"""The least memory that a schedule needs at each position: what a search may fill up to the budget.

Counted for the most frugal schedule: each gather is alone, launched where it is awaited; each gradient is alone,
reduced at once, or, where that does not fit, deferred until it does.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphshard.planner.costs import most_gathered_bytes
from graphshard.planner.memory import copied_out_bytes, held_by_launch
from graphshard.planner.problem import Problem


@dataclass(frozen=True)
class MemoryFloor:
    """The least memory, by position, the end included.

    Attributes:
        needed: of computation, of gathered parameters in use, of reduced gradients and of deferred ones.
        reducing: on top, of gradients that come, and of the reduction of one.
        deferred: (reduction, the position at which it fits), of those that cannot be reduced at once.
        fits: whether this schedule fits the budget.
    """

    needed: tuple[int, ...]
    reducing: tuple[int, ...]
    deferred: tuple[tuple[int, int], ...]
    fits: bool

    @property
    def total(self) -> tuple[int, ...]:
        """Both together."""
        return tuple(map(sum, zip(self.needed, self.reducing, strict=True)))


def least_memory(problem: Problem, budget_bytes: float, spare_bytes: int = 0) -> MemoryFloor:
    """The memory floor of `problem` within a budget.

    Reductions of gradients above `spare_bytes` are deferred unless that much more fits.
    """
    needed = _bytes_of_gathers(problem)
    end = len(problem.ops)
    for i, op_bytes in enumerate(problem.op_bytes):
        needed[i] += op_bytes
    needed[end] += problem.op_bytes[-1] if problem.op_bytes else 0
    shards = [0] * (end + 1)
    at: list[list[int]] = [[] for _ in range(end + 1)]
    for i, reduction in enumerate(problem.reductions):
        shards[reduction.ready] += reduction.shard_bytes
        at[reduction.ready].append(i)
    total = 0
    for position in range(end + 1):
        total += shards[position]
        needed[position] += total
    deferred, waiting = list[tuple[int, int]](), list[int]()
    reducing = [0] * (end + 1)
    for position in range(end + 1):
        for i in sorted(waiting, key=lambda i: (problem.reductions[i].grad_bytes, i)):
            held = held_by_launch([problem.reductions[i]])[0]
            spare = _spare_bytes(problem, i, spare_bytes)
            more = _reducing_bytes(problem, at[position]) + held + spare
            if needed[position] + more <= budget_bytes or position == end:
                waiting.remove(i)
                deferred.append((i, position))
                reducing[position] = held
        now = sorted(at[position], key=lambda i: problem.reductions[i].grad_bytes)
        while now and position < end:
            spare = _spare_bytes(problem, now[-1], spare_bytes)
            if needed[position] + reducing[position] + _reducing_bytes(problem, now) + spare <= budget_bytes:
                break
            i = now.pop()
            waiting.append(i)
            for later in range(max(0, position - 1), end + 1):
                needed[later] += problem.reductions[i].grad_bytes
        reducing[position] += _reducing_bytes(problem, now)
        if position:
            reducing[position - 1] = max(reducing[position - 1], sum(problem.reductions[i].grad_bytes for i in now))
        for i, since in deferred:
            if since == position:
                for later in range(position + 1, end + 1):
                    needed[later] -= problem.reductions[i].grad_bytes
    fits = all(a + b <= budget_bytes for a, b in zip(needed, reducing, strict=True))
    return MemoryFloor(tuple(needed), tuple(reducing), tuple(deferred), fits)


def _bytes_of_gathers(problem: Problem) -> list[int]:
    """Of gathered parameters from first to last use, and of the launch and the copy-out of one at its first use."""
    end = len(problem.ops)
    change, once = [0] * (end + 2), [0] * (end + 1)
    for gather in problem.gathers:
        held = most_gathered_bytes(gather)
        change[gather.first_use] += held
        change[min(max(gather.last_use, gather.first_use), end) + 1] -= held
        extra = held_by_launch([gather])[0] + copied_out_bytes([gather]) - held
        once[gather.first_use] = max(once[gather.first_use], extra)
    live, needed = 0, []
    for position in range(end + 1):
        live += change[position]
        needed.append(live + once[position])
    return needed


def _spare_bytes(problem: Problem, i: int, spare_bytes: int) -> int:
    return spare_bytes if problem.reductions[i].grad_bytes > spare_bytes else 0


def _reducing_bytes(problem: Problem, reductions: list[int]) -> int:
    """Of gradients that are ready at one position, and of the reduction of one."""
    items = [problem.reductions[i] for i in reductions]
    return sum(item.grad_bytes for item in items) + max((held_by_launch([item])[0] for item in items), default=0)
