"""A second, plain simulator: events on a clock, memory by intervals. To compare with; slow and short."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from graphshard.planner import Problem, Reduction, Schedule

Work = tuple[str, float, object]


def program(problem: Problem, schedule: Schedule) -> Iterator[Work]:
    """What the computation does in order: ("work", us, -), ("start", us, (stream, name)), ("wait", -, name)."""
    for at in range(len(problem.ops) + 1):
        for _, step, number in (action for action in schedule.actions if action.before == at):
            members = schedule.members(problem, number)
            first, alone = members[0], len(members) == 1
            then = first.then if isinstance(first, Reduction) else None
            if step == "launch":
                yield "work", first.alone_in_us if alone else sum(m.copy_in_us for m in members), None
                yield "work", problem.launch_us, None
                us = first.transfer.us(sum(m.wire_bytes for m in members))
                yield "start", us, (first.transfer.stream, (number, 1))
                continue
            yield "wait", 0.0, (number, 2 if step == "finish" else 1)
            if step == "wait" and then is not None:
                yield "work", problem.launch_us, None
                yield "start", then.us(sum(m.shard_bytes for m in members)), (then.stream, (number, 2))
            else:
                yield "work", first.alone_out_us if alone else sum(m.copy_out_us for m in members), None
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
        for action in schedule.actions:
            if action.before == at:
                ticks[action.bucket, action.step] = tick
                where.append(at)
                tick += 1
        op_tick[at] = tick
        where.append(at)
        tick += 1
    lives: list[tuple[int, int, int]] = []  # first tick, last tick, bytes
    for number, bucket in enumerate(schedule.buckets):
        members = schedule.members(problem, number)
        launch, wait, alone = ticks[number, "launch"], ticks[number, "wait"], len(members) == 1
        if bucket.kind == "reduce":
            wire, shards = sum(m.wire_bytes for m in members), sum(m.shard_bytes for m in members)
            lives.append((launch, tick, shards))
            sent = alone and members[0].alone_in_us == 0.0
            if not sent:
                lives.append((launch, wait - 1, wire))
            if (number, "finish") in ticks:
                lives.append((wait, ticks[number, "finish"], shards))
            for i in bucket.members:
                reduction = problem.reductions[i]
                born = op_tick[reduction.ready - 1] if reduction.ready else 0
                lives.append((born, wait - 1 if sent else launch, reduction.grad_bytes))
            continue
        items = [problem.gathers[i] for i in bucket.members]
        wire = sum(item.wire_bytes for item in items)
        copied_in = not alone or items[0].alone_in_us > 0.0
        copied_out = not alone or items[0].alone_out_bytes > 0
        if copied_in:
            lives.append((launch, wait, sum(item.shard_bytes for item in items)))
        if copied_out:
            lives.append((launch, wait, wire))
        for item in items:
            end = tick if item.last_use == len(problem.ops) else op_tick[max(item.last_use, where[wait])]
            full = item.full_bytes if not alone else item.alone_out_bytes
            lives.append((wait, end, full) if copied_out else (launch, end, wire))
    last = len(problem.ops) - 1
    frees = {  # ticks at which nothing is allocated
        ticks[number, step]
        for number, bucket in enumerate(schedule.buckets)
        for step in ("wait", "finish")
        if bucket.kind == "reduce" and (number, step) in ticks
    }
    return max(
        problem.op_bytes[min(where[t], last)] + sum(size for first, end, size in lives if first <= t <= end)
        for t in range(tick)
        if t not in frees
    )
