"""Schedules the buckets of a candidate, position by position, timed as the simulator would time it.

The ready list of a stream is its first gather and its first reduction that can be launched. One of them is launched
when the stream would run dry, if it fits, a gather in front of its first use at the latest. The gather has priority
unless its slack is long enough for the reduction. What is launched ahead leaves the memory floor of every later
position free, so that a run does not end where nothing fits: it frees memory by waits for reductions and by reducing
at once what is ready, and a bucket that does not fit is cut.

Source: list scheduling; admission as in the banker's algorithm.
"""

from __future__ import annotations

from graphshard.planner.candidates import Candidate, ScheduledCandidate
from graphshard.planner.costs import BucketCost
from graphshard.planner.scheduler_state import SchedulerState
from graphshard.planner.search_space import SearchSpace

# A bucket without slack is cut to what fits, down to this part of it.
_LEAST_PART = 0.25


def list_schedule(space: SearchSpace, candidate: Candidate) -> ScheduledCandidate | None:
    """The schedule of a candidate; None where the budget does not suffice."""
    scheduler = ListScheduler(space, candidate)
    return ScheduledCandidate(scheduler.end_us(), tuple(scheduler.steps), candidate) if scheduler.run() else None


class ListScheduler(SchedulerState):
    """One run over all positions of a program."""

    def run(self) -> bool:
        """Whether everything fits."""
        space, op_us, count = self.space, self.problem.op_us, len(self.problem.ops)
        space.positions_scheduled += count
        for at in range(count):
            self._await_reductions(at)
            if not (self._launch_and_await(at) and self._reduce_in_time(at)):
                return False
            if not self._free_memory(at, space.op_bytes[at] + space.grads[at]):
                return False
            if at in space.own:
                self._run_own(at)
            self._compute(op_us[at])
            self.live += space.grads[at] - self.frees[at]
        return self._launch_and_await(count) and self._finish(count)

    # -- one position

    def _await_reductions(self, at: int) -> None:
        """Awaits those that should be done."""
        margin = self.candidate.wait_margin
        while self.pending and self.pending[0][0] + margin * self.pending[0][1].us <= self.now_us:
            self._wait_reduction(at)
        while self.finishing and self.finishing[0][0] + margin * self.finishing[0][1].then_us <= self.now_us:
            self._finish_reduction(at)

    def _launch_and_await(self, at: int) -> bool:
        """Launches and awaits what is needed at `at`, and launches ahead."""
        for number, uses in enumerate(self.space.first_use):
            while self.gathered[number] < len(uses) and uses[self.gathered[number]] <= at:
                if not self._launch_needed(number, at):
                    return False
        needed = sorted(self.in_flight.get(at, ()), key=lambda entry: entry[0])
        until_us = max(self.now_us, needed[-1][0]) if needed else self.now_us
        self._fill_streams(at, until_us)
        for entry in needed:
            if not self._wait_gather(entry, at):
                return False
        if needed:
            self._fill_streams(at, self.now_us)
        return True

    def _fill_streams(self, at: int, until_us: float) -> None:
        """Launches what keeps the streams busy while the op at `at` runs, which begins at `until_us`."""
        dry_us = until_us + (self.problem.op_us[at] if at < len(self.problem.op_us) else 0.0)
        for stream in self.streams:
            while self.free_us[stream] - self.candidate.lookahead * self.last_us[stream] < dry_us:
                if not self._launch_ahead(stream, at, max(until_us, self.now_us)):
                    break

    def _launch_ahead(self, stream: int, at: int, until_us: float) -> bool:
        """Launches what has priority in the ready list of a stream, or else the other."""
        gather = self._next_gather(stream, at)
        reduction = self._next_reduction(stream, at)
        if gather is None:
            return reduction is not None and self._launch_reduction(reduction, at, until_us)
        number, cost = gather
        latest_us = until_us + self.latest_start_us[number][self.gathered[number]] - self.problem.elapsed_us[at]
        slack_us = latest_us - max(until_us, self.free_us[stream])
        behind = reduction is not None and (slack_us >= reduction[1].us or not self.candidate.gathers_first)
        if reduction is not None and behind and self._launch_reduction(reduction, at, until_us):
            return True
        is_due = slack_us <= self.candidate.max_slack * cost.us
        if is_due and self._launch_gather(number, cost, at, until_us, cut=slack_us < 0.0):
            return True
        return reduction is not None and not behind and self._launch_reduction(reduction, at, until_us)

    def _next_gather(self, stream: int, at: int) -> tuple[int, BucketCost] | None:
        best: tuple[int, BucketCost] | None = None
        for number, of in enumerate(self.gather_streams):
            first = self.gathered[number]
            if of == stream and first < len(self.space.gather_sequences[number]):
                cost = self.space.gather(number, first, self._gather_end(number, first))
                if cost.ready <= at and (best is None or cost.need < best[1].need):
                    best = number, cost
        return best

    def _next_reduction(self, stream: int, at: int) -> tuple[int, BucketCost] | None:
        """The first bucket that is ready as a whole, else one that was deferred."""
        best: tuple[int, BucketCost] | None = None
        for number, of in enumerate(self.reduction_streams):
            first, ready = self.reduced[number], self.space.ready[number]
            if of == stream and first < len(ready) and ready[first] <= at:
                last = self._end(self.reduction_ends[number], first)
                if ready[last - 1] <= at:
                    cost = self.space.reduction(number, first, last)
                    if best is None or cost.ready < best[1].ready:
                        best = number, cost
        if best is None:
            for number in self.deferred:
                cost = self.space.reduction(number, 0, 1)
                if cost.stream == stream and cost.ready <= at:
                    return number, cost
        return best

    # -- gathers

    def _launch_needed(self, number: int, at: int) -> bool:
        """Launches the gather that is needed at `at`, cut to what fits."""
        first = self.gathered[number]
        last = self._gather_end(number, first)
        while True:
            cost = self.space.gather(number, first, last)
            if self._launch_gather(number, cost, at, self.now_us, cut=True):
                return True
            if not self._wait_or_reduce(at):
                break
        cost = self.space.gather(number, first, first + 1)
        return self._free_memory(at, self.space.op_bytes[at] + cost.held + cost.out) and self._start_gather(
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
            if self._fits_ahead(self.space.gather(number, first, first + middle), at, until_us):
                low = middle
            else:
                high = middle - 1
        if not low:
            return False
        part = self.space.gather(number, first, first + low)
        if part.ready > at or (cost.need > at and part.wire_bytes < _LEAST_PART * cost.wire_bytes):
            return False
        return self._start_gather(number, part, at)

    def _fits_ahead(self, cost: BucketCost, at: int, until_us: float) -> bool:
        headroom, reserve = self.headroom_ahead, self.candidate.reserve_bytes if cost.need > at else 0
        if cost.need > at + 1 and min(headroom[at + 1 : cost.need]) - reserve < cost.held:
            return False
        for first, last, held in cost.live_ranges:
            least = headroom[first] if last == first + 1 else min(headroom[first:last])
            if least - (reserve if first > at else 0) < held:
                return False
        # What is ready can still be reduced, one gradient after the other.
        more = cost.held + (cost.out if cost.need <= at else 0) + self._unreduced(at)[1]
        return self._fits_now(at, more + self.space.op_bytes[at], until_us)

    def _fits_now(self, at: int, more: int, until_us: float) -> bool:
        """Whether `more` fits at `at`, behind waits for reductions that are done by `until_us`."""
        short = self.live + more - self.budget + sum(cost.out for _, cost in self.in_flight.get(at, ()))
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
        self.in_flight.setdefault(cost.need, []).append((end_us, cost))
        for first, last, held in ((at + 1, cost.need, cost.held), *cost.live_ranges):
            if held and last > first:
                for headroom in (self.headroom, self.headroom_ahead):
                    headroom[first:last] = [num_bytes - held for num_bytes in headroom[first:last]]
        return True

    def _wait_gather(self, entry: tuple[float, BucketCost], at: int) -> bool:
        end_us, cost = entry
        if not self._free_memory(at, self.space.op_bytes[at] + cost.out):
            return False
        self.now_us = max(self.now_us, end_us)
        self._compute(cost.out_us)
        self.live += cost.out - cost.freed_by_wait
        self.in_flight[cost.need].remove(entry)
        for last_use, num_bytes in cost.frees:
            if last_use < len(self.problem.ops):
                self.frees[max(last_use, at)] += num_bytes
        self.steps.append((at, "wait", cost.bucket))
        return True

    def _launch_reduction(self, found: tuple[int, BucketCost], at: int, until_us: float) -> bool:
        number, cost = found
        # It should not be awaited for its memory at once: the op, too, must fit.
        more = max(cost.held, cost.held - cost.freed + self.space.grads[at]) + self.space.op_bytes[at]
        return self._fits_now(at, more, until_us) and self._start_reduction(number, cost, at)

    def _finish(self, end: int) -> bool:
        """Reduces the rest, and awaits all."""
        for number, ready in enumerate(self.space.ready):
            while self.reduced[number] < len(ready):
                last = self._end(self.reduction_ends[number], self.reduced[number])
                if not self._reduce_now(number, last, end):
                    return False
        for number in list(self.deferred):
            if not self._reduce_now(number, 1, end):
                return False
        while self.pending:
            self._wait_reduction(end)
        while self.finishing:
            self._finish_reduction(end)
        self._run_own(end)
        return True
