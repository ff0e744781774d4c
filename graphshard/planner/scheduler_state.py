"""The state of one run of the list scheduler: clock, memory, what is in flight, and reductions that free memory."""

from __future__ import annotations

from bisect import bisect_left

from graphshard.planner.candidates import Candidate
from graphshard.planner.costs import BucketCost
from graphshard.planner.schedule import Bucket, StepKind
from graphshard.planner.search_space import SearchSpace
from graphshard.planner.simulator import computed_until


class SchedulerState:
    """What has been scheduled up to a position, timed and counted as the simulator would.

    Attributes:
        gathered, reduced: for each sequence, how many of its tasks have been launched.
        deferred: reductions that wait for headroom, and the position at which each fits.
        in_flight: gathers that are launched, not awaited, by the position that needs them, each with its end.
        pending: reductions likewise, in order.
        finishing: those whose all-reduce is under way.
        headroom, headroom_ahead: of the search space, less what has been launched ahead.
        latest_start_us: for each place in a sequence of gathers, on the clock of computation.
    """

    def __init__(self, space: SearchSpace, candidate: Candidate) -> None:
        self.space, self.candidate, self.problem = space, candidate, space.problem
        self.budget, self.contention = space.budget_bytes, space.problem.contention
        self.gather_ends = [sorted(ends) for ends in candidate.gather_ends]
        self.reduction_ends = [sorted(ends) for ends in candidate.reduction_ends]
        self.now_us = 0.0
        self.free_us = [0.0] * len(self.problem.streams)
        self.last_us = [0.0] * len(self.problem.streams)
        self.live = space.first_grads
        self.gathered, self.reduced = [0] * len(space.gather_sequences), [0] * len(space.reduction_sequences)
        self.deferred = dict(enumerate(space.deferred, start=len(space.reduction_sequences)))
        self.in_flight: dict[int, list[tuple[float, BucketCost]]] = {}
        self.pending: list[tuple[float, BucketCost]] = []
        self.finishing: list[tuple[float, BucketCost]] = []
        self.own_ends_us: dict[str, float] = {}
        self.headroom = list(space.headroom)
        self.headroom_ahead = list(space.headroom_ahead)
        self.frees = [0] * (len(self.problem.ops) + 1)
        self.steps: list[tuple[int, StepKind, Bucket]] = []
        self.gather_streams = [self.problem.gathers[s[0]].transfer.stream for s in space.gather_sequences]
        self.reduction_streams = [self.problem.reductions[s[0]].transfer.stream for s in space.reduction_sequences]
        self.latest_start_us = [self._latest_start_us(number) for number in range(len(space.gather_sequences))]
        self.streams = sorted({*self.gather_streams, *(r.transfer.stream for r in self.problem.reductions)})

    def _latest_start_us(self, number: int) -> list[float]:
        """When to launch what begins at each place at the latest; reductions on its stream slow it down."""
        ends, elapsed = self.gather_ends[number], self.problem.elapsed_us
        slowdown = self.space.slowdown[self.gather_streams[number]]
        found = [float("inf")] * (len(self.space.gather_sequences[number]) + 1)
        for first, last in zip(reversed([0, *ends[:-1]]), reversed(ends), strict=True):
            cost = self.space.gather(number, first, last)
            latest_us = min(elapsed[cost.need], found[last]) - cost.us * slowdown
            found[first:last] = [latest_us] * (last - first)
        return found

    def end_us(self) -> float:
        return max([self.now_us, *self.free_us])

    # -- reductions

    def _start_reduction(self, number: int, cost: BucketCost, at: int) -> bool:
        if number < len(self.reduced):
            self.reduced[number] += len(cost.bucket.members)
        else:
            _, fits_at = self.deferred.pop(number)
            grad = self.problem.reductions[cost.bucket.members[0]].grad_bytes
            for position in range(at + 1, fits_at + 1):
                self.headroom[position] += grad
                self.headroom_ahead[position] += grad
        self.pending.append((self._start(cost, at), cost))
        return True

    def _reduce_in_time(self, at: int) -> bool:
        """Reduces what is ready if it would not fit behind the op at `at`."""
        for number, (_, fits_at) in list(self.deferred.items()):
            if fits_at <= at and not self._reduce_now(number, 1, at):
                return False
        while True:
            waiting, most = self._unreduced(at)
            if not waiting or waiting + most + self.space.reducing[at + 1] <= self.headroom[at + 1]:
                return True
            if not self._reduce_some(at):
                return False

    def _unreduced(self, at: int) -> tuple[int, int]:
        """Bytes of gradients that are ready and not reduced, and the most that the reduction of one takes."""
        waiting = most = 0
        for number, counts in enumerate(self.space.ready_at):
            first, last = self.reduced[number], counts[at]
            if last > first:
                grads = self.space.grads_before[number]
                waiting += grads[last] - grads[first]
                most = max(most, max(self.space.alone_held[number][first:last]))
        return waiting, most

    def _reduce_some(self, at: int) -> bool:
        """Launches the reduction of as much that is ready as fits, behind all waits that this takes."""
        for number, ready in enumerate(self.space.ready):
            first = self.reduced[number]
            last = bisect_left(ready, at + 1, lo=first)
            if last > first:
                return self._reduce_now(number, min(last, self._end(self.reduction_ends[number], first)), at)
        return False

    def _reduce_now(self, number: int, last: int, at: int) -> bool:
        first = self.reduced[number] if number < len(self.reduced) else 0
        free = self.budget - self.live - self.space.op_bytes[at] + sum(c.freed_by_wait for _, c in self.pending)
        while last > first + 1 and self.space.reduction(number, first, last).held > free:
            last = first + (last - first) // 2
        cost = self.space.reduction(number, first, last)
        while self.live + cost.held + self.space.op_bytes[at] > self.budget:
            if self.pending:
                self._wait_reduction(at)
            elif self.finishing:
                self._finish_reduction(at)
            else:
                return False
        return self._start_reduction(number, cost, at)

    def _wait_reduction(self, at: int) -> None:
        end_us, cost = self.pending.pop(0)
        self.now_us = max(self.now_us, end_us)
        self.live -= cost.freed_by_wait
        self.steps.append((at, "wait", cost.bucket))
        if cost.then < 0:
            self._compute(cost.out_us)
            return
        self._compute(self.problem.launch_us)
        self.free_us[cost.then] = max(self.now_us, self.free_us[cost.then]) + cost.then_us
        self.finishing.append((self.free_us[cost.then], cost))

    def _finish_reduction(self, at: int) -> None:
        end_us, cost = self.finishing.pop(0)
        self.now_us = max(self.now_us, end_us)
        self._compute(cost.out_us)
        self.live -= cost.freed_by_finish
        self.steps.append((at, "finish", cost.bucket))

    def _free_memory(self, at: int, more: int) -> bool:
        """Awaits and reduces until `more` fits."""
        while self.live + more > self.budget:
            if not self._wait_or_reduce(at):
                return False
        return True

    def _wait_or_reduce(self, at: int) -> bool:
        if self.pending:
            self._wait_reduction(at)
            return True
        if self.finishing:
            self._finish_reduction(at)
            return True
        return self._reduce_some(at)

    # -- time

    def _compute(self, work_us: float) -> None:
        if self.contention:
            self.now_us = computed_until(self.now_us, work_us, max(self.free_us), self.contention)
        else:
            self.now_us += work_us

    def _start(self, cost: BucketCost, at: int) -> float:
        self._compute(cost.in_us)
        end_us = max(self.now_us, self.free_us[cost.stream]) + cost.us
        self.free_us[cost.stream], self.last_us[cost.stream] = end_us, cost.us
        self.live += cost.held - cost.freed
        self.steps.append((at, "launch", cost.bucket))
        return end_us

    def _run_own(self, at: int) -> None:
        for launches, own in self.space.own.get(at, ()):
            if launches:
                self.free_us[own.stream] = max(self.now_us, self.free_us[own.stream]) + own.us
                self.own_ends_us[own.name] = self.free_us[own.stream]
            else:
                self.now_us = max(self.now_us, self.own_ends_us[own.name])

    def _gather_end(self, number: int, first: int) -> int:
        return min(self._end(self.gather_ends[number], first), self.space.reach[number][first])

    def _end(self, ends: list[int], first: int) -> int:
        return ends[bisect_left(ends, first + 1)]
