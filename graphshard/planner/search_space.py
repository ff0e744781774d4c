"""What all candidates for one problem share: sequences of tasks, costs of buckets, headroom of each position."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from operator import sub

from graphshard.planner.costs import BucketCost, gather_cost, reduction_cost, sequences
from graphshard.planner.memory import held_by_launch
from graphshard.planner.memory_floor import least_memory
from graphshard.planner.problem import OwnCollective, Problem


class SearchSpace:
    """One problem within one budget.

    Attributes:
        gather_sequences, reduction_sequences: indices of tasks; buckets are intervals of these.
        headroom: for each position, the budget less the memory floor without what reductions need there.
        headroom_ahead: the same less what they need, too: free for what is launched at an earlier position.
        deferred: (reduction, the position at which it fits), of those that cannot be reduced at once.
        fits: whether the memory floor is within the budget.
        positions_scheduled: by all candidates together: what the search has cost.
    """

    def __init__(self, problem: Problem, budget_bytes: float, spare_bytes: int = 0) -> None:
        self.problem, self.budget_bytes, self.spare_bytes = problem, budget_bytes, spare_bytes
        floor = least_memory(problem, budget_bytes, spare_bytes)
        self.fits, self.deferred = floor.fits, floor.deferred
        self.headroom = [budget_bytes - needed for needed in floor.needed]
        self.reducing = floor.reducing
        self.headroom_ahead = list(map(sub, self.headroom, floor.reducing))
        self.gather_sequences = sequences(problem.gathers)
        self.reduction_sequences = sequences(problem.reductions, frozenset(i for i, _ in floor.deferred))
        self.first_use = [[problem.gathers[i].first_use for i in sequence] for sequence in self.gather_sequences]
        # Where a bucket that begins at a place must end: what is behind is ready only when its first member is needed.
        self.reach = [self._reach(sequence) for sequence in self.gather_sequences]
        reductions = [[problem.reductions[i] for i in sequence] for sequence in self.reduction_sequences]
        self.ready = [[reduction.ready for reduction in sequence] for sequence in reductions]
        # For each sequence of reductions: how many are ready at a position, gradients in front of a place, one alone.
        self.ready_at = [[bisect_right(ready, at) for at in range(len(problem.ops) + 1)] for ready in self.ready]
        self.grads_before = [[0, *accumulate(r.grad_bytes for r in sequence)] for sequence in reductions]
        self.alone_held = [[held_by_launch([r])[0] for r in sequence] for sequence in reductions]
        self.grads = [0] * (len(problem.ops) + 1)
        for reduction in problem.reductions:
            if reduction.ready:
                self.grads[reduction.ready - 1] += reduction.grad_bytes
        self.first_grads = sum(r.grad_bytes for r in problem.reductions if not r.ready)
        self.op_bytes = [*problem.op_bytes, problem.op_bytes[-1] if problem.op_bytes else 0]
        self.own: dict[int, list[tuple[bool, OwnCollective]]] = {}
        for own in problem.own:
            self.own.setdefault(own.launch, []).append((True, own))
        for own in sorted(problem.own, key=lambda own: own.wait):
            self.own.setdefault(own.wait, []).append((False, own))
        self.slowdown = self._slowdown()
        self.positions_scheduled = 0
        self._gather_costs: dict[tuple[int, int, int], BucketCost] = {}
        self._reduction_costs: dict[tuple[int, int, int], BucketCost] = {}

    def _reach(self, sequence: list[int]) -> list[int]:
        gathers = [self.problem.gathers[i] for i in sequence]
        delayed = [place for place, gather in enumerate(gathers) if gather.ready]
        return [
            next((at for at in delayed if at > place and gathers[at].ready > gather.first_use), len(sequence))
            for place, gather in enumerate(gathers)
        ]

    def _slowdown(self) -> list[float]:
        """For each stream, the time of all its bytes over that of its gathers'."""
        gathers_us, others_us = [0.0] * len(self.problem.streams), [0.0] * len(self.problem.streams)
        for gather in self.problem.gathers:
            gathers_us[gather.transfer.stream] += gather.wire_bytes * gather.transfer.us_per_byte
        for reduction in self.problem.reductions:
            others_us[reduction.transfer.stream] += reduction.wire_bytes * reduction.transfer.us_per_byte
        return [1.0 + other / us if us else 1.0 for us, other in zip(gathers_us, others_us, strict=True)]

    def gather(self, sequence: int, first: int, last: int) -> BucketCost:
        """The bucket of a sequence's tasks from `first` up to `last`."""
        found = self._gather_costs.get((sequence, first, last))
        if found is None:
            found = gather_cost(self.problem, tuple(self.gather_sequences[sequence][first:last]))
            self._gather_costs[sequence, first, last] = found
        return found

    def reduction(self, sequence: int, first: int, last: int) -> BucketCost:
        """The same of reductions; sequences behind the last are of one deferred reduction each."""
        found = self._reduction_costs.get((sequence, first, last))
        if found is None:
            number = sequence - len(self.reduction_sequences)  # of a deferred one
            members = [self.deferred[number][0]] if number >= 0 else self.reduction_sequences[sequence][first:last]
            found = self._reduction_costs[sequence, first, last] = reduction_cost(self.problem, tuple(members))
        return found
