"""What walks over a problem share: wishes, costs of buckets, the room of each position."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from operator import sub

from graphshard.planner.costs import BucketCost, gather_cost, reduction_cost, sequences
from graphshard.planner.floor import least_memory
from graphshard.planner.memory import held_by_launch
from graphshard.planner.problem import OwnCollective, Problem
from graphshard.planner.schedule import Action, Bucket, Schedule, Step

Ends = tuple[frozenset[int], ...]


@dataclass(frozen=True)
class Wish:
    """What a walk tries to do.

    Attributes:
        gathers, reductions: for each sequence, the places at which a bucket ends.
        queued: a collective is launched when this part of the one before it on its stream is still to come.
        lead: a gather is launched only if its spare time is at most this multiple of its own.
        reserve_bytes: left free by gathers that are launched ahead.
        gathers_first: of a gather that has no spare time and a reduction the gather is launched first.
        margin: a reduction is awaited when it should have been done for this part of its own time.
    """

    gathers: Ends
    reductions: Ends
    queued: float = 0.0
    lead: float = 2.0
    reserve_bytes: int = 0
    margin: float = 0.5
    gathers_first: bool = True


class Ground:
    """What all walks over one problem within one budget share.

    Attributes:
        gathers, reductions: sequences of members, buckets are intervals of these.
        walked: how many positions have been walked, by all walks.
    """

    def __init__(self, problem: Problem, budget_bytes: float, spare_bytes: int = 0) -> None:
        self.problem, self.budget_bytes, self.spare_bytes = problem, budget_bytes, spare_bytes
        floor = least_memory(problem, budget_bytes, spare_bytes)
        self.fits, self.late = floor.fits, floor.late
        self.room = [budget_bytes - needed for needed in floor.needed]
        self.reducing = floor.reducing
        self.free_ahead = list(map(sub, self.room, floor.reducing))
        self.gathers = sequences(problem.gathers)
        self.reductions = sequences(problem.reductions, frozenset(i for i, _ in floor.late))
        self.first_use = [[problem.gathers[i].first_use for i in sequence] for sequence in self.gathers]
        # Where a bucket that begins at a place must end: what is behind is ready only when its first member is needed.
        self.reach = [self._reach(sequence) for sequence in self.gathers]
        self.ready = [[problem.reductions[i].ready for i in sequence] for sequence in self.reductions]
        # For each sequence of reductions: how many are ready at a position, gradients in front of a place, one alone.
        self.ready_at = [[bisect_right(ready, at) for at in range(len(problem.ops) + 1)] for ready in self.ready]
        self.grads_before = [
            [0, *accumulate(problem.reductions[i].grad_bytes for i in sequence)] for sequence in self.reductions
        ]
        self.alone_held = [[held_by_launch([problem.reductions[i]])[0] for i in seq] for seq in self.reductions]
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
        self.slower = self._slower()
        self.walked = 0
        self._gather_costs: dict[tuple[int, int, int], BucketCost] = {}
        self._reduction_costs: dict[tuple[int, int, int], BucketCost] = {}

    def _reach(self, sequence: list[int]) -> list[int]:
        gathers = [self.problem.gathers[i] for i in sequence]
        late = [place for place, gather in enumerate(gathers) if gather.ready]
        return [
            next((at for at in late if at > place and gathers[at].ready > gather.first_use), len(sequence))
            for place, gather in enumerate(gathers)
        ]

    def _slower(self) -> list[float]:
        """For each stream, its bytes over those of its gathers."""
        gathers, all_us = [0.0] * len(self.problem.streams), [0.0] * len(self.problem.streams)
        for gather in self.problem.gathers:
            gathers[gather.transfer.stream] += gather.wire_bytes * gather.transfer.us_per_byte
        for reduction in self.problem.reductions:
            all_us[reduction.transfer.stream] += reduction.wire_bytes * reduction.transfer.us_per_byte
        return [1.0 + other / us if us else 1.0 for us, other in zip(gathers, all_us, strict=True)]

    def gather(self, sequence: int, first: int, last: int) -> BucketCost:
        """The bucket of a sequence's members from `first` up to `last`."""
        found = self._gather_costs.get((sequence, first, last))
        if found is None:
            found = gather_cost(self.problem, tuple(self.gathers[sequence][first:last]))
            self._gather_costs[sequence, first, last] = found
        return found

    def reduction(self, sequence: int, first: int, last: int) -> BucketCost:
        """The same of reductions; sequences behind the last are of one late reduction each."""
        found = self._reduction_costs.get((sequence, first, last))
        if found is None:
            count = len(self.reductions)
            members = self.reductions[sequence][first:last] if sequence < count else [self.late[sequence - count][0]]
            found = self._reduction_costs[sequence, first, last] = reduction_cost(self.problem, tuple(members))
        return found


@dataclass(frozen=True)
class Placed:
    """What a walk found: its time in us, and the buckets that it made."""

    step_us: float
    steps: tuple[tuple[int, Step, Bucket], ...]
    wish: Wish

    @property
    def buckets(self) -> int:
        """How many collectives there are."""
        return sum(1 for _, step, _ in self.steps if step == "launch")

    def schedule(self) -> Schedule:
        """As a schedule."""
        number_of: dict[Bucket, int] = {}
        for _, _, bucket in self.steps:
            number_of.setdefault(bucket, len(number_of))
        return Schedule(tuple(number_of), tuple(Action(at, step, number_of[bucket]) for at, step, bucket in self.steps))
