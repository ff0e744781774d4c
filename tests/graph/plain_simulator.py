"""A second, plain simulator: events on a clock, memory by intervals. To compare with; slow and short."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any

from graphshard.planner import Problem, ReductionTask, Schedule

Work = tuple[str, float, object]


def is_apart(members: Sequence[Any]) -> bool:
    """Whether each tensor is sent by itself: one alone, or where the sum of that is less than of copies."""
    if len(members) == 1 or any(m.coalesced_us is None for m in members):
        return len(members) == 1
    apart = [us for m in members for us in (m.coalesced_us, m.alone_in_us, m.alone_out_us)]
    return sum(apart) < sum(us for m in members for us in (m.copy_in_us, m.copy_out_us))


def program(problem: Problem, schedule: Schedule) -> Iterator[Work]:
    """What the computation does in order: ("work", us, -), ("start", us, (stream, name)), ("wait", -, name)."""
    for at in range(len(problem.ops) + 1):
        for _, kind, number in (step for step in schedule.steps if step.before == at):
            members = schedule.members(problem, number)
            first, apart = members[0], is_apart(members)
            then = first.then if isinstance(first, ReductionTask) else None
            if kind == "launch":
                yield "work", sum(m.alone_in_us if apart else m.copy_in_us for m in members), None
                yield "work", problem.launch_us, None
                us = first.transfer.us(sum(m.wire_bytes for m in members))
                us += sum(m.coalesced_us or 0.0 for m in members) if apart and len(members) > 1 else 0.0
                yield "start", us, (first.transfer.stream, (number, 1))
                continue
            yield "wait", 0.0, (number, 2 if kind == "finish" else 1)
            if kind == "wait" and then is not None:
                yield "work", problem.launch_us, None
                yield "start", then.us(sum(m.shard_bytes for m in members)), (then.stream, (number, 2))
            else:
                yield "work", sum(m.alone_out_us if apart else m.copy_out_us for m in members), None
        for own in problem.own:
            if own.launch == at:
                yield "start", own.us, (own.stream, own.name)
        for own in sorted(problem.own, key=lambda own: own.wait):
            if own.wait == at:
                yield "wait", 0.0, own.name
        if at < len(problem.ops):
            yield "work", problem.op_us[at], None


def plain_step_us(problem: Problem, schedule: Schedule) -> float:
    """The time of the step: a clock that goes from event to event."""
    now = 0.0
    queues: list[list[tuple[object, float]]] = [[] for _ in problem.streams]
    ends: list[tuple[float, int]] = []  # when the first in a stream's queue is done
    done: set[object] = set()

    def arrive() -> float:
        end, stream = heapq.heappop(ends)
        done.add(queues[stream].pop(0)[0])
        if queues[stream]:
            heapq.heappush(ends, (end + queues[stream][0][1], stream))
        return end

    for what, us, about in program(problem, schedule):
        if what == "start":
            assert isinstance(about, tuple)
            stream, name = about
            queues[stream].append((name, us))
            if len(queues[stream]) == 1:
                heapq.heappush(ends, (now + us, stream))
        elif what == "wait":
            while about not in done:
                now = max(now, arrive())
        else:
            while us > 0.0:
                while ends and ends[0][0] <= now:
                    arrive()
                rate = 1.0 / (1.0 + problem.contention) if ends else 1.0
                until = min(ends[0][0] if ends else now + us / rate, now + us / rate)
                us = us - (until - now) * rate if until < now + us / rate else 0.0
                now = until
    while ends:
        now = max(now, arrive())
    return now


def plain_peak_bytes(problem: Problem, schedule: Schedule) -> int:
    """The most that is allocated: each buffer lives from one tick to another; ticks follow the order of the program."""
    ticks: dict[tuple[int, str], int] = {}
    op_tick: dict[int, int] = {}
    tick = 0
    where: list[int] = []  # position of each tick
    for at in range(len(problem.ops) + 1):
        for step in schedule.steps:
            if step.before == at:
                ticks[step.bucket, step.kind] = tick
                where.append(at)
                tick += 1
        op_tick[at] = tick
        where.append(at)
        tick += 1
    lives: list[tuple[int, int, int]] = []  # first tick, last tick, bytes
    for number, bucket in enumerate(schedule.buckets):
        members = schedule.members(problem, number)
        launch, wait, apart = ticks[number, "launch"], ticks[number, "wait"], is_apart(members)
        if bucket.kind == "reduce":
            shards = sum(m.shard_bytes for m in members)
            lives.append((launch, tick, shards))
            if (number, "finish") in ticks:
                lives.append((wait, ticks[number, "finish"], shards))
            for i in bucket.members:
                reduction = problem.reductions[i]
                born = op_tick[reduction.ready - 1] if reduction.ready else 0
                sent = apart and reduction.alone_in_us == 0.0
                if not sent:
                    lives.append((launch, wait - 1, reduction.wire_bytes))
                lives.append((born, wait - 1 if sent else launch, reduction.grad_bytes))
            continue
        for item in (problem.gathers[i] for i in bucket.members):
            if not apart or item.alone_in_us > 0.0:
                lives.append((launch, wait, item.shard_bytes))
            end = tick if item.last_use == len(problem.ops) else op_tick[max(item.last_use, where[wait])]
            copied_bytes = item.alone_out_bytes if apart else item.full_bytes
            if copied_bytes:
                lives += [(launch, wait, item.wire_bytes), (wait, end, copied_bytes)]
            else:
                lives.append((launch, end, item.wire_bytes))
    last = len(problem.ops) - 1
    frees = {  # ticks at which nothing is allocated
        ticks[number, kind]
        for number, bucket in enumerate(schedule.buckets)
        for kind in ("wait", "finish")
        if bucket.kind == "reduce" and (number, kind) in ticks
    }
    return max(
        problem.op_bytes[min(where[t], last)] + sum(size for first, end, size in lives if first <= t <= end)
        for t in range(tick)
        if t not in frees
    )
