"""The state of a walk through a program: its clock, its memory, and reductions that make room."""

from __future__ import annotations

from bisect import bisect_left

from graphshard.planner.costs import BucketCost
from graphshard.planner.ground import Ground, Wish
from graphshard.planner.schedule import Bucket, Step
from graphshard.planner.simulator import computed_until


class Walk:
    """What has happened up to a position, timed and counted as the simulator would."""

    def __init__(self, ground: Ground, wish: Wish) -> None:
        self.ground, self.wish, self.problem = ground, wish, ground.problem
        self.budget, self.contention = ground.budget_bytes, ground.problem.contention
        self.gather_ends = [sorted(ends) for ends in wish.gathers]
        self.reduction_ends = [sorted(ends) for ends in wish.reductions]
        self.now_us = 0.0
        self.free_us = [0.0] * len(self.problem.streams)
        self.last_us = [0.0] * len(self.problem.streams)
        self.live = ground.first_grads
        self.gathered, self.reduced = [0] * len(ground.gathers), [0] * len(ground.reductions)
        self.is_late = dict(enumerate(ground.late, start=len(ground.reductions)))
        self.flying: dict[int, list[tuple[float, BucketCost]]] = {}  # by need
        self.pending: list[tuple[float, BucketCost]] = []
        self.finishing: list[tuple[float, BucketCost]] = []
        self.own_ends_us: dict[str, float] = {}
        self.room = list(ground.room)
        self.ahead = list(ground.free_ahead)  # the room without what gradients of a later position need
        self.frees = [0] * (len(self.problem.ops) + 1)
        self.steps: list[tuple[int, Step, Bucket]] = []
        self.gather_streams = [self.problem.gathers[s[0]].transfer.stream for s in ground.gathers]
        self.scatter_streams = [self.problem.reductions[s[0]].transfer.stream for s in ground.reductions]
        self.latest_us = [self._latest_us(number) for number in range(len(ground.gathers))]
        self.streams = sorted({*self.gather_streams, *(r.transfer.stream for r in self.problem.reductions)})

    def _latest_us(self, number: int) -> list[float]:
        """For each place in a sequence of gathers, when to launch it at the latest, on the clock of computation.

        Reductions on its stream slow it down.
        """
        ends, elapsed = self.gather_ends[number], self.problem.elapsed_us
        slower = self.ground.slower[self.gather_streams[number]]
        found = [float("inf")] * (len(self.ground.gathers[number]) + 1)
        for first, last in zip(reversed([0, *ends[:-1]]), reversed(ends), strict=True):
            cost = self.ground.gather(number, first, last)
            latest_us = min(elapsed[cost.need], found[last]) - cost.us * slower
            found[first:last] = [latest_us] * (last - first)
        return found

    def end_us(self) -> float:
        return max([self.now_us, *self.free_us])

    # -- reductions

    def _start_reduction(self, number: int, cost: BucketCost, at: int) -> bool:
        if number < len(self.reduced):
            self.reduced[number] += len(cost.bucket.members)
        else:
            _, late = self.is_late.pop(number)
            grad = self.problem.reductions[cost.bucket.members[0]].grad_bytes
            for position in range(at + 1, late + 1):
                self.room[position] += grad
                self.ahead[position] += grad
        self.pending.append((self._start(cost, at), cost))
        return True

    def _reduce_in_time(self, at: int) -> bool:
        """Reduces what is ready if it would not fit behind the op at `at`."""
        for number, (_, late) in list(self.is_late.items()):
            if late <= at and not self._reduce_now(number, 1, at):
                return False
        while True:
            waiting, most = self._unreduced(at)
            if not waiting or waiting + most + self.ground.reducing[at + 1] <= self.room[at + 1]:
                return True
            if not self._reduce_some(at):
                return False

    def _unreduced(self, at: int) -> tuple[int, int]:
        """Bytes of gradients that are ready and not reduced, and the most that the reduction of one takes."""
        waiting = most = 0
        for number, counts in enumerate(self.ground.ready_at):
            first, last = self.reduced[number], counts[at]
            if last > first:
                grads = self.ground.grads_before[number]
                waiting += grads[last] - grads[first]
                most = max(most, max(self.ground.alone_held[number][first:last]))
        return waiting, most

    def _reduce_some(self, at: int) -> bool:
        """Launches the reduction of as much that is ready as fits, behind all waits that this takes."""
        for number, ready in enumerate(self.ground.ready):
            first = self.reduced[number]
            last = bisect_left(ready, at + 1, lo=first)
            if last > first:
                return self._reduce_now(number, min(last, self._end(self.reduction_ends[number], first)), at)
        return False

    def _reduce_now(self, number: int, last: int, at: int) -> bool:
        first = self.reduced[number] if number < len(self.reduced) else 0
        free = self.budget - self.live - self.ground.op_bytes[at] + sum(c.freed_by_wait for _, c in self.pending)
        while last > first + 1 and self.ground.reduction(number, first, last).held > free:
            last = first + (last - first) // 2
        cost = self.ground.reduction(number, first, last)
        while self.live + cost.held + self.ground.op_bytes[at] > self.budget:
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

    def _make_room(self, at: int, more: int) -> bool:
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
        for launches, own in self.ground.own.get(at, ()):
            if launches:
                self.free_us[own.stream] = max(self.now_us, self.free_us[own.stream]) + own.us
                self.own_ends_us[own.name] = self.free_us[own.stream]
            else:
                self.now_us = max(self.now_us, self.own_ends_us[own.name])

    def _gather_end(self, number: int, first: int) -> int:
        return min(self._end(self.gather_ends[number], first), self.ground.reach[number][first])

    def _end(self, ends: list[int], first: int) -> int:
        return ends[bisect_left(ends, first + 1)]
