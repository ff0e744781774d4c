"""Searches a schedule: a beam of partial ones is carried through the program, position by position.

Each partial schedule is timed as the simulator would time it, so that a decision (launch the next gathers as one
bucket, launch the gradients that are ready, or go on) sees its effect at once. Of those that have launched the same,
what is worse in time, in every stream and in memory is dropped; the rest is ranked by a lower bound of what the whole
will take. A collective is launched only when its stream would run dry: an earlier launch starts no earlier and holds
memory for longer. Reductions are awaited when they are done, or when their memory is needed.

Source: beam search with dominance, as in list scheduling with release times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from graphshard.planner.baselines import in_launch_order
from graphshard.planner.problem import Gather, Problem, Reduction, copy_in_us, copy_out_us, then_us, transfer_us
from graphshard.planner.schedule import Action, Bucket, Schedule
from graphshard.planner.simulator import computed_until, copied_out_bytes, freed_by_wait, held_by_launch

# Up to this many members in one sequence every size of a bucket is tried.
_SMALL = 8
_UNITS_AHEAD = (1, 2, 3, 4, 6, 8, 12, 16)
# A reduction is awaited for nothing when it should have been done for this part of its own time.
_MARGIN = 0.5


class _Cost(NamedTuple):
    """What a bucket takes, and what it holds."""

    bucket: Bucket
    stream: int
    then: int  # stream of the all-reduce behind a reduce-scatter, -1: none
    need: int  # the position at which a gather must have arrived
    ready: int
    copy_in_us: float
    us: float
    copy_out_us: float
    then_us: float
    held: int
    freed: int  # once its copy-in is done
    out: int  # copied out of a gather
    kept: int  # until the last uses of a gather's members
    freed_by_wait: int


class _Partial(NamedTuple):
    """A schedule up to some position.

    `gathered[k]`, `reduced[k]`: how many of sequence k have been launched. `flying`: (end, gather), launched and not
    awaited. `pending`: reductions likewise. `past`: (last action, what was before it).
    """

    now_us: float
    free_us: tuple[float, ...]
    gathered: tuple[int, ...]
    reduced: tuple[int, ...]
    flying: tuple[tuple[float, _Cost], ...]
    pending: tuple[tuple[float, _Cost], ...]
    live_bytes: int
    past: Any


def beam_schedule(problem: Problem, budget_bytes: float, width: int = 16, units: int = 16) -> Schedule | None:
    """The best schedule that is found within `budget_bytes`, or None.

    Args:
        problem: what to plan.
        budget_bytes: most that may be allocated, by the simulator's count.
        width: of the beam.
        units: most units in one bucket.
    """
    return _Beam(problem, budget_bytes, width, units).run()


class _Beam:
    def __init__(self, problem: Problem, budget_bytes: float, width: int, units: int) -> None:
        self.problem, self.budget, self.width = problem, budget_bytes, width
        self.gathers = _sequences(problem.gathers, [g.first_use for g in problem.gathers])
        self.reductions = _sequences(problem.reductions, [r.ready for r in problem.reductions])
        self.sizes = [_sizes(problem.gathers, sequence, units) for sequence in self.gathers]
        self.prefixes = [_sizes(problem.reductions, sequence, units) for sequence in self.reductions]
        self.ready = [[problem.reductions[i].ready for i in sequence] for sequence in self.reductions]
        self.first_use = [[problem.gathers[i].first_use for i in sequence] for sequence in self.gathers]
        self.streams = [problem.gathers[sequence[0]].transfer.stream for sequence in self.gathers]
        self.scatter_streams = [problem.reductions[sequence[0]].transfer.stream for sequence in self.reductions]
        self.ahead = [_ahead_us(problem, sequence) for sequence in self.gathers]
        self.left = [_left_us(problem, sequence) for sequence in self.reductions]
        self.copies_in = [_copies_us(problem.gathers, sequence) for sequence in self.gathers]
        self.copies_out = [_copies_us(problem.reductions, sequence) for sequence in self.reductions]
        self.costs: dict[tuple[bool, int, int, int], _Cost] = {}
        self.reserve = _reserve_bytes(problem, self.reductions)
        self.grads, self.frees = [0] * (len(problem.ops) + 1), [0] * (len(problem.ops) + 1)
        for reduction in problem.reductions:
            self.grads[max(0, reduction.ready - 1)] += reduction.grad_bytes
        for gather in problem.gathers:
            if gather.last_use < len(problem.ops):
                self.frees[gather.last_use] += _kept_bytes(gather)
        self.own: dict[int, list[tuple[bool, int, float]]] = {}
        for own in problem.own:
            self.own.setdefault(own.launch, []).append((True, own.stream, own.us))
            self.own.setdefault(own.wait, []).append((False, own.stream, own.us))

    def run(self) -> Schedule | None:
        zero = (0.0,) * len(self.problem.streams)
        labels = [_Partial(0.0, zero, (0,) * len(self.gathers), (0,) * len(self.reductions), (), (), 0, None)]
        for at in range(len(self.problem.ops)):
            labels = [done for label in labels for early in self._launches(label, at) for done in self._pass(early, at)]
            labels = self._pruned(labels, at + 1)
        ends = [end for label in labels if (end := self._end(label)) is not None]
        if not ends:
            return None
        return _unwound(min(ends, key=lambda label: (max(label.now_us, *label.free_us), label.live_bytes)).past)

    # -- one position

    def _launches(self, label: _Partial, at: int) -> Iterator[_Partial]:
        """`label` itself, and what else could be launched before the op at `at`, in front of its waits."""
        while label.pending and label.pending[0][0] + _MARGIN * label.pending[0][1].us <= label.now_us:
            label = self._wait_reduction(label, at)
        yield label
        dry_us = self._after(label, at)
        for key, ready in enumerate(self.ready):
            first = label.reduced[key]
            if first == len(ready) or ready[first] > at or label.free_us[self.scatter_streams[key]] >= dry_us:
                continue
            for last in self.prefixes[key][first]:
                if ready[last - 1] > at:
                    break
                launched = self._launch(label, at, False, key, last)
                if launched is not None:
                    yield launched
                    yield from self._gather_launches(launched, at, dry_us)
        yield from self._gather_launches(label, at, dry_us)

    def _gather_launches(self, label: _Partial, at: int, dry_us: float) -> Iterator[_Partial]:
        for key, sizes in enumerate(self.sizes):
            first = label.gathered[key]
            free_us = label.free_us[self.streams[key]]
            # Nothing is lost by a later launch if there is time enough for what is left, one unit at a time.
            if free_us >= dry_us or self._has_time(label, key, at, dry_us):
                continue
            for last in sizes[first]:
                launched = self._launch(label, at, True, key, last)
                if launched is None:
                    continue
                yield launched
                if at == 0 and last == first + 1:  # a short first bucket is followed at once by the next one
                    for then in sizes[last]:
                        if (second := self._launch(launched, at, True, key, then)) is not None:
                            yield second

    def _has_time(self, label: _Partial, key: int, at: int, dry_us: float) -> bool:
        first = label.gathered[key]
        if first == len(self.first_use[key]):
            return True
        ahead = self.ahead[key][first]
        rest_us = self.problem.compute_us - self.problem.elapsed_us[at]
        begin_us = max(dry_us, label.free_us[self.streams[key]])
        # All else that is left on the stream might come first.
        others_us = self._left(label, self.streams[key]) - ahead.left_us
        return begin_us + ahead.until_us + ahead.slack_us + others_us <= label.now_us + rest_us

    def _left(self, label: _Partial, stream: int) -> float:
        gathers = zip(self.streams, self.ahead, label.gathered, strict=True)
        reductions = zip(self.scatter_streams, self.left, label.reduced, strict=True)
        left_us = sum(ahead[done].left_us for own, ahead, done in gathers if own == stream)
        return left_us + sum(left[done] for own, left, done in reductions if own == stream)

    def _pass(self, label: _Partial, at: int) -> Iterator[_Partial]:
        """Runs the op at `at`, behind the waits that it needs and what is launched behind these."""
        for waited in self._waits(label, at):
            if (ran := self._run(waited, at)) is not None:
                yield ran
            if waited is not label:
                for later in self._gather_launches(waited, at, waited.now_us + self.problem.op_us[at]):
                    if (ran := self._run(later, at)) is not None:
                        yield ran

    def _waits(self, label: _Partial, at: int) -> Iterator[_Partial]:
        for key, uses in enumerate(self.first_use):
            first = label.gathered[key]
            if first < len(uses) and uses[first] <= at:  # it must be launched now
                for last in self.sizes[key][first]:
                    launched = self._launch(label, at, True, key, last, forced=True)
                    if launched is not None:
                        yield from self._waits(launched, at)
                return
        for entry in label.flying:
            if entry[1].need <= at:
                waited = self._wait_gather(label, entry, at)
                if waited is not None:
                    yield from self._waits(waited, at)
                return
        yield label

    def _run(self, label: _Partial, at: int) -> _Partial | None:
        room = self._with_room(label, at, self.grads[at])
        if room is None:
            return None
        now_us, free_us = room.now_us, room.free_us
        for launches, stream, us in self.own.get(at, ()):
            if launches:
                free_us = _set(free_us, stream, max(now_us, free_us[stream]) + us)
            else:
                now_us = max(now_us, free_us[stream])
        now_us = computed_until(now_us, self.problem.op_us[at], max(free_us), self.problem.contention)
        live = room.live_bytes + self.grads[at] - self.frees[at]
        return room._replace(now_us=now_us, free_us=free_us, live_bytes=live)  # noqa: SLF001

    def _end(self, label: _Partial) -> _Partial | None:
        end = len(self.problem.ops)
        for key, ready in enumerate(self.ready):
            if label.reduced[key] < len(ready):
                launched = self._launch(label, end, False, key, len(ready), forced=True)
                if launched is None:
                    return None
                label = launched
        while label.pending:
            label = self._wait_reduction(label, end)
        past = label.past
        for _, bucket, step in _steps(past):
            if step == "launch" and bucket.kind == "reduce":
                if self.problem.reductions[bucket.members[0]].then is not None:
                    past = ((end, bucket, "finish"), past)
        return label._replace(past=past)  # noqa: SLF001

    # -- steps

    def _after(self, label: _Partial, at: int) -> float:
        """About when the op at `at` will be done."""
        now_us = max([label.now_us, *(end_us for end_us, cost in label.flying if cost.need <= at)])
        return now_us + self.problem.op_us[at]

    def _cost(self, gathers: bool, key: int, first: int, last: int) -> _Cost:
        found = self.costs.get((gathers, key, first, last))
        if found is None:
            found = self.costs[gathers, key, first, last] = self._new_cost(gathers, key, first, last)
        return found

    def _new_cost(self, gathers: bool, key: int, first: int, last: int) -> _Cost:
        members = tuple((self.gathers if gathers else self.reductions)[key][first:last])
        items: list[Gather] | list[Reduction]
        if gathers:
            items = [self.problem.gathers[i] for i in members]
            need, kept, then, after_us = (
                min(item.first_use for item in items),
                sum(map(_kept_bytes, items)),
                -1,
                0.0,
            )
        else:
            items = [self.problem.reductions[i] for i in members]
            need, kept, after_us = 0, 0, then_us(items)
            then = -1 if items[0].then is None else items[0].then.stream
        held, freed = held_by_launch(items)
        return _Cost(
            Bucket("gather" if gathers else "reduce", members),
            items[0].transfer.stream,
            then,
            need,
            max(item.ready for item in items),
            copy_in_us(items) + self.problem.launch_us,
            transfer_us(items),
            copy_out_us(items),
            after_us,
            held,
            freed,
            copied_out_bytes(items),
            kept,
            freed_by_wait(items),
        )

    def _launch(
        self, label: _Partial, at: int, gathers: bool, key: int, last: int, forced: bool = False
    ) -> _Partial | None:
        done = label.gathered if gathers else label.reduced
        cost = self._cost(gathers, key, done[key], last)
        if cost.ready > at:
            return None
        # What could be launched later leaves room for its own copy-out, and for a unit's reduction.
        more = cost.held if forced or not gathers else cost.held + cost.out + self.reserve
        room = self._with_room(label, at, more, wait=forced or not gathers)
        if room is None:
            return None
        free_us, stream = room.free_us, cost.stream
        now_us = computed_until(room.now_us, cost.copy_in_us, max(free_us), self.problem.contention)
        end_us = max(now_us, free_us[stream]) + cost.us
        past = ((at, cost.bucket, "launch"), room.past)
        live = room.live_bytes + cost.held - cost.freed
        free_us, done = _set(free_us, stream, end_us), _set(done, key, last)
        if gathers:
            flying = (*room.flying, (end_us, cost))
            return _Partial(now_us, free_us, done, room.reduced, flying, room.pending, live, past)
        pending = (*room.pending, (end_us, cost))
        return _Partial(now_us, free_us, room.gathered, done, room.flying, pending, live, past)

    def _wait_gather(self, label: _Partial, entry: tuple[float, _Cost], at: int) -> _Partial | None:
        end_us, cost = entry
        room = self._with_room(label, at, cost.out)
        if room is None:
            return None
        now_us = computed_until(max(room.now_us, end_us), cost.copy_out_us, max(room.free_us), self.problem.contention)
        return room._replace(  # noqa: SLF001
            now_us=now_us,
            flying=tuple(other for other in room.flying if other is not entry),
            live_bytes=room.live_bytes - cost.held + cost.kept,
            past=((at, cost.bucket, "wait"), room.past),
        )

    def _wait_reduction(self, label: _Partial, at: int) -> _Partial:
        end_us, cost = label.pending[0]
        now_us, free_us = max(label.now_us, end_us), label.free_us
        work_us = cost.copy_out_us if cost.then < 0 else self.problem.launch_us
        now_us = computed_until(now_us, work_us, max(free_us), self.problem.contention)
        if cost.then >= 0:
            free_us = _set(free_us, cost.then, max(now_us, free_us[cost.then]) + cost.then_us)
        return label._replace(  # noqa: SLF001
            now_us=now_us,
            free_us=free_us,
            pending=label.pending[1:],
            live_bytes=label.live_bytes - cost.freed_by_wait,
            past=((at, cost.bucket, "wait"), label.past),
        )

    def _with_room(self, label: _Partial, at: int, more_bytes: int, wait: bool = True) -> _Partial | None:
        """`label`, behind waits for reductions if there is no room for `more_bytes` before; None if there is none."""
        most = self.budget - self.problem.op_bytes[min(at, len(self.problem.op_bytes) - 1)] - more_bytes
        while label.live_bytes > most:
            if not wait or not label.pending:
                return None
            label = self._wait_reduction(label, at)
        return label

    # -- the beam

    def _pruned(self, labels: list[_Partial], at: int) -> list[_Partial]:
        groups: dict[object, list[tuple[float, int, int, _Partial]]] = {}
        rest_us = self.problem.compute_us - self.problem.elapsed_us[at]
        for number, label in enumerate(labels):
            # What waits alone will free counts as free: else nothing would be launched before it must.
            held = label.live_bytes - sum(cost.freed_by_wait for _, cost in label.pending)
            entry = (self._estimate(label, rest_us), held, number, label)
            groups.setdefault((label.gathered, label.reduced), []).append(entry)
        kept = []
        for group in groups.values():
            group.sort()
            front: list[_Partial] = []
            for entry in group:
                if not any(_dominates(other, entry[3]) for other in front):
                    front.append(entry[3])
                    kept.append(entry)
                    if len(front) == 4:
                        break
        kept.sort()
        return [entry[3] for entry in kept[: self.width]]

    def _estimate(self, label: _Partial, rest_us: float) -> float:
        """What the whole will take about, from what computation and streams have left, one collective per unit."""
        done = zip((*self.copies_in, *self.copies_out), (*label.gathered, *label.reduced), strict=True)
        estimate = label.now_us + rest_us + sum(copies[count] for copies, count in done)
        owed = list(label.free_us)
        for key, done in enumerate(label.gathered):
            stream, ahead = self.streams[key], self.ahead[key][done]
            if ahead.left_us:
                estimate = max(estimate, label.free_us[stream] + ahead.until_us)
                owed[stream] += ahead.left_us
        for key, done in enumerate(label.reduced):
            owed[self.scatter_streams[key]] += self.left[key][done]
        for end_us, cost in label.flying:
            estimate = max(estimate, end_us + self.problem.compute_us - self.problem.elapsed_us[cost.need])
        return max(estimate, *owed)


class _Ahead(NamedTuple):
    """What is left of a sequence of gathers, if each unit were one bucket.

    `until_us`: from now to the end of the program; `slack_us`: half the time of the next unit; `left_us`: of all
    gathers that are left.
    """

    until_us: float
    slack_us: float
    left_us: float


def _ahead_us(problem: Problem, sequence: Sequence[int]) -> list[_Ahead]:
    found = [_Ahead(0.0, 0.0, 0.0)]
    unit, unit_us = "", 0.0
    for i in reversed(sequence):
        gather, last = problem.gathers[i], found[-1]
        us, alpha_us = gather.wire_bytes * gather.transfer.us_per_byte, gather.transfer.alpha_us
        behind_us = problem.compute_us - problem.elapsed_us[gather.first_use]
        new = gather.unit != unit or not last.left_us
        unit, unit_us = gather.unit, us + (alpha_us if new else unit_us)
        us += alpha_us if new else 0.0
        until_us = max(us + behind_us + (0.0 if new else alpha_us), last.until_us + us if last.left_us else 0.0)
        found.append(_Ahead(until_us, 0.5 * unit_us, last.left_us + us))
    return found[::-1]


def _left_us(problem: Problem, sequence: Sequence[int]) -> list[float]:
    found, unit = [0.0], None
    for i in reversed(sequence):
        reduction = problem.reductions[i]
        us = reduction.wire_bytes * reduction.transfer.us_per_byte
        found.append(found[-1] + us + (reduction.transfer.alpha_us if reduction.unit != unit else 0.0))
        unit = reduction.unit
    return found[::-1]


def _reserve_bytes(problem: Problem, sequences: Sequence[Sequence[int]]) -> int:
    """Of the largest unit's reduction, apart from units that lie around others: they can wait."""
    units: dict[tuple[int, str], list[Reduction]] = {}
    for number, sequence in enumerate(sequences):
        for i in sequence if len(sequences) == 1 or len({problem.reductions[j].unit for j in sequence}) > 1 else ():
            units.setdefault((number, problem.reductions[i].unit), []).append(problem.reductions[i])
    return max((held_by_launch(members)[0] for members in units.values()), default=0)


def _copies_us(items: Sequence[Gather] | Sequence[Reduction], sequence: Sequence[int]) -> list[float]:
    """For each place, the least time of the copies that are left."""
    found = [0.0]
    for i in reversed(sequence):
        item = items[i]
        alone_us, together_us = item.alone_in_us + item.alone_out_us, item.copy_in_us + item.copy_out_us
        found.append(found[-1] + min(alone_us, together_us))
    return found[::-1]


def _set(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _kept_bytes(gather: Gather) -> int:
    return max(gather.full_bytes, gather.alone_out_bytes or gather.wire_bytes)


def _sequences(items: Sequence[Gather] | Sequence[Reduction], places: Sequence[int]) -> list[list[int]]:
    """Items whose buckets are intervals, in order: of one key, apart from units that lie around others."""
    spans: dict[str, list[int]] = {}
    for item, place in zip(items, places, strict=True):
        spans.setdefault(item.unit, []).append(place)
    found: dict[tuple[int, str | None], list[int]] = {}
    for i, item in enumerate(items):
        low, high = min(spans[item.unit]), max(spans[item.unit])
        around = any(low < place < high for unit, places_ in spans.items() if unit != item.unit for place in places_)
        found.setdefault((item.key, item.unit if around else None), []).append(i)
    return list(found.values())


def _sizes(items: Sequence[Gather] | Sequence[Reduction], sequence: Sequence[int], units: int) -> list[list[int]]:
    """For each place in a sequence, where a bucket that begins there may end."""
    count = len(sequence)
    ends = [i for i in range(1, count) if items[sequence[i]].unit != items[sequence[i - 1]].unit] + [count]
    sizes = []
    for first in range(count):
        later = [end for end in ends if end > first]
        found = {first + 1, *(later[n - 1] for n in _UNITS_AHEAD if n <= min(units, len(later)))}
        if count <= _SMALL:
            found |= set(range(first + 1, count + 1))
        elif later[0] - first > 2:
            found.add(first + 2)
        sizes.append(sorted(found))
    return [*sizes, []]


def _dominates(a: _Partial, b: _Partial) -> bool:
    return (
        a.now_us <= b.now_us
        and a.live_bytes <= b.live_bytes
        and len(a.pending) <= len(b.pending)
        and all(x <= y for x, y in zip(a.free_us, b.free_us, strict=True))
    )


def _steps(past: Any) -> list[tuple[int, Bucket, Any]]:
    found = []
    while past is not None:
        step, past = past
        found.append(step)
    return found[::-1]


def _unwound(past: Any) -> Schedule:
    steps = _steps(past)
    number_of: dict[Bucket, int] = {}
    for _, bucket, _ in steps:
        number_of.setdefault(bucket, len(number_of))
    actions = tuple(Action(at, step, number_of[bucket]) for at, bucket, step in steps)
    return in_launch_order(Schedule(tuple(number_of), actions))
