"""Places wished-for buckets in a program: one walk over its positions, timed as the simulator would time it.

A collective is launched when its stream would run dry, if it fits, and in front of its first use at the latest. Of a
gather and a reduction the gather comes first unless it has time. What is launched ahead leaves room for the floor of
every later position, so that a walk does not end where nothing fits: it makes room by waits for reductions and by
reducing at once what is ready, and a bucket that does not fit is cut.

Source: list scheduling; admission as in the banker's algorithm.
"""

from __future__ import annotations

from bisect import bisect_left

from graphshard.planner.costs import BucketCost
from graphshard.planner.ground import Ground, Placed, Wish
from graphshard.planner.schedule import Bucket, Step
from graphshard.planner.simulator import computed_until

# A bucket that comes late anyway is cut to what fits, down to this part of it.
_LEAST_PART = 0.25


def placed(ground: Ground, wish: Wish) -> Placed | None:
    """Walks the program; None where the budget does not suffice."""
    walk = _Walk(ground, wish)
    return Placed(walk.end_us(), tuple(walk.steps), wish) if walk.run() else None


class _Walk:
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

    def run(self) -> bool:
        ground, op_us, count = self.ground, self.problem.op_us, len(self.problem.ops)
        ground.walked += count
        for at in range(count):
            while self.pending and self.pending[0][0] + self.wish.margin * self.pending[0][1].us <= self.now_us:
                self._wait_reduction(at)
            if not (self._arrive(at) and self._reduce_in_time(at)):
                return False
            if not self._make_room(at, ground.op_bytes[at] + ground.grads[at]):
                return False
            if at in ground.own:
                self._run_own(at)
            self._compute(op_us[at])
            self.live += ground.grads[at] - self.frees[at]
        return self._finish(count)

    # -- one position

    def _arrive(self, at: int) -> bool:
        """Launches and awaits what is needed at `at`, and launches ahead."""
        for number, uses in enumerate(self.ground.first_use):
            while self.gathered[number] < len(uses) and uses[self.gathered[number]] <= at:
                if not self._force(number, at):
                    return False
        needed = sorted(self.flying.get(at, ()), key=lambda entry: entry[0])
        until_us = max(self.now_us, needed[-1][0]) if needed else self.now_us
        self._fill(at, until_us)
        for entry in needed:
            if not self._wait_gather(entry, at):
                return False
        if needed:
            self._fill(at, self.now_us)
        return True

    def _fill(self, at: int, until_us: float) -> None:
        """Launches what keeps the streams busy while the op at `at` runs, which begins at `until_us`."""
        dry_us = until_us + self.problem.op_us[at]
        for stream in self.streams:
            while self.free_us[stream] - self.wish.queued * self.last_us[stream] < dry_us:
                if not self._launch_ahead(stream, at, max(until_us, self.now_us)):
                    break

    def _launch_ahead(self, stream: int, at: int, until_us: float) -> bool:
        gather = self._next_gather(stream, at)
        reduction = self._next_reduction(stream, at)
        if gather is None:
            return reduction is not None and self._launch_reduction(reduction, at, until_us)
        number, cost = gather
        start_us = until_us + self.latest_us[number][self.gathered[number]] - self.problem.elapsed_us[at]
        spare_us = start_us - max(until_us, self.free_us[stream])
        if reduction is not None and spare_us >= reduction[1].us and self._launch_reduction(reduction, at, until_us):
            return True
        if spare_us <= self.wish.lead * cost.us and self._launch_gather(number, cost, at, until_us, spare_us < 0.0):
            return True
        return reduction is not None and spare_us < reduction[1].us and self._launch_reduction(reduction, at, until_us)

    def _next_gather(self, stream: int, at: int) -> tuple[int, BucketCost] | None:
        best: tuple[int, BucketCost] | None = None
        for number, of in enumerate(self.gather_streams):
            first = self.gathered[number]
            if of == stream and first < len(self.ground.gathers[number]):
                cost = self.ground.gather(number, first, self._end(self.gather_ends[number], first))
                if cost.ready <= at and (best is None or cost.need < best[1].need):
                    best = number, cost
        return best

    def _end(self, ends: list[int], first: int) -> int:
        return ends[bisect_left(ends, first + 1)]

    def _next_reduction(self, stream: int, at: int) -> tuple[int, BucketCost] | None:
        """The first bucket that is whole, then one that is late."""
        best: tuple[int, BucketCost] | None = None
        for number, of in enumerate(self.scatter_streams):
            first, ready = self.reduced[number], self.ground.ready[number]
            if of == stream and first < len(ready) and ready[first] <= at:
                last = self._end(self.reduction_ends[number], first)
                if ready[last - 1] <= at:
                    cost = self.ground.reduction(number, first, last)
                    if best is None or cost.ready < best[1].ready:
                        best = number, cost
        if best is None:
            for number in self.is_late:
                cost = self.ground.reduction(number, 0, 1)
                if cost.stream == stream and cost.ready <= at:
                    return number, cost
        return best

    # -- gathers

    def _force(self, number: int, at: int) -> bool:
        """Launches the gather that is needed at `at`, cut to what fits."""
        first = self.gathered[number]
        last = self._end(self.gather_ends[number], first)
        while True:
            cost = self.ground.gather(number, first, last)
            if self._launch_gather(number, cost, at, self.now_us, cut=True):
                return True
            if not self._wait_or_reduce(at):
                break
        cost = self.ground.gather(number, first, first + 1)
        return self._make_room(at, self.ground.op_bytes[at] + cost.held + cost.out) and self._start_gather(
            number, cost, at
        )

    def _launch_gather(self, number: int, cost: BucketCost, at: int, until_us: float, cut: bool) -> bool:
        if self._fits_ahead(cost, at, until_us):
            return self._start_gather(number, cost, at)
        if not cut:
            return False
        first = self.gathered[number]
        low, high = 0, len(cost.bucket.members) - 1  # the most members that fit
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits_ahead(self.ground.gather(number, first, first + middle), at, until_us):
                low = middle
            else:
                high = middle - 1
        if not low:
            return False
        part = self.ground.gather(number, first, first + low)
        if part.ready > at or (cost.need > at and part.wire_bytes < _LEAST_PART * cost.wire_bytes):
            return False
        return self._start_gather(number, part, at)

    def _fits_ahead(self, cost: BucketCost, at: int, until_us: float) -> bool:
        room, reserve = self.ahead, self.wish.reserve_bytes if cost.need > at else 0
        if cost.need > at + 1 and min(room[at + 1 : cost.need]) - reserve < cost.held:
            return False
        for first, last, held in cost.spans:
            if (room[first] if last == first + 1 else min(room[first:last])) - (reserve if first > at else 0) < held:
                return False
        # What is ready can still be reduced, one gradient after the other.
        more = cost.held + (cost.out if cost.need <= at else 0) + self._unreduced(at)[1]
        return self._has_room(at, more + self.ground.op_bytes[at], until_us)

    def _has_room(self, at: int, more: int, until_us: float) -> bool:
        """Whether `more` fits at `at`, behind waits for reductions that are done by `until_us`."""
        short = self.live + more - self.budget + sum(cost.out for _, cost in self.flying.get(at, ()))
        if short <= 0:
            return True
        for waits, (end_us, cost) in enumerate(self.pending, start=1):
            if end_us > until_us:
                return False
            short -= cost.freed_by_wait
            if short <= 0:
                for _ in range(waits):
                    self._wait_reduction(at)
                return True
        return False

    def _start_gather(self, number: int, cost: BucketCost, at: int) -> bool:
        end_us = self._start(cost, at)
        self.gathered[number] += len(cost.bucket.members)
        self.flying.setdefault(cost.need, []).append((end_us, cost))
        for first, last, held in ((at + 1, cost.need, cost.held), *cost.spans):
            if held and last > first:
                self.room[first:last] = [room - held for room in self.room[first:last]]
                self.ahead[first:last] = [room - held for room in self.ahead[first:last]]
        return True

    def _wait_gather(self, entry: tuple[float, BucketCost], at: int) -> bool:
        end_us, cost = entry
        if not self._make_room(at, self.ground.op_bytes[at] + cost.out):
            return False
        self.now_us = max(self.now_us, end_us)
        self._compute(cost.out_us)
        self.live += cost.out - cost.freed_by_wait
        self.flying[cost.need].remove(entry)
        for last_use, num_bytes in cost.frees:
            if last_use < len(self.problem.ops):
                self.frees[max(last_use, at)] += num_bytes
        self.steps.append((at, "wait", cost.bucket))
        return True

    # -- reductions

    def _launch_reduction(self, found: tuple[int, BucketCost], at: int, until_us: float) -> bool:
        number, cost = found
        # It should not be awaited for its memory at once: the op, too, must fit.
        more = max(cost.held, cost.held - cost.freed + self.ground.grads[at]) + self.ground.op_bytes[at]
        return self._has_room(at, more, until_us) and self._start_reduction(number, cost, at)

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
            if not self.pending:
                return False
            self._wait_reduction(at)
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

    def _make_room(self, at: int, more: int) -> bool:
        while self.live + more > self.budget:
            if not self._wait_or_reduce(at):
                return False
        return True

    def _wait_or_reduce(self, at: int) -> bool:
        if self.pending:
            self._wait_reduction(at)
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

    def _finish(self, end: int) -> bool:
        """Reduces the rest, and awaits all."""
        for number, ready in enumerate(self.ground.ready):
            while self.reduced[number] < len(ready):
                last = self._end(self.reduction_ends[number], self.reduced[number])
                if not self._reduce_now(number, last, end):
                    return False
        for number in list(self.is_late):
            if not self._reduce_now(number, 1, end):
                return False
        while self.pending:
            self._wait_reduction(end)
        for end_us, cost in self.finishing:
            self.now_us = max(self.now_us, end_us)
            self._compute(cost.out_us)
            self.steps.append((end, "finish", cost.bucket))
        self._run_own(end)
        return True
