"""How fast any schedule could be: what a plan is measured against.

The greatest of several times that no schedule can beat: computation with the head and the tail that nothing can hide;
what each gather has to wait for, then the computation behind it; the computation in front of each reduction, then what
is left to reduce; and the communication of each process group. A member is either alone in its bucket and has a latency
of its own, which slows computation down, or is copied with others: the cheaper of the two is counted. Copies are hidden
where something is awaited anyway, and memory is not limited.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from graphshard.planner.problem import GatherTask, Problem, ReductionTask


def lower_bound_us(problem: Problem) -> float:
    """No schedule of `problem` takes less."""
    elapsed, total_us = problem.elapsed_us, problem.compute_us
    head_us = max(_at_once([g for g in problem.gathers if elapsed[g.first_use] == 0.0]).values(), default=0.0)
    tail_us = max(_at_once([r for r in problem.reductions if elapsed[r.ready] == total_us]).values(), default=0.0)
    items: list[GatherTask | ReductionTask] = [*problem.gathers, *problem.reductions]
    busy = _at_once(items)
    for own in problem.own:
        busy[own.stream] += own.us
    busiest_us = max(busy.values(), default=0.0)
    bounds = [busiest_us, head_us, tail_us]
    if total_us:
        # While a collective is under way, computation is slower: it makes up for that behind or before.
        slowed = problem.contention / (1.0 + problem.contention)
        slowed_us = slowed * max(0.0, busiest_us - head_us - tail_us)
        bounds.append(head_us + total_us + _copies_us(problem, head_us, tail_us, {}) + slowed_us + tail_us)
        for stream in range(len(problem.streams)):
            wire_us = sum(
                item.wire_bytes * item.transfer.us_per_byte for item in items if item.transfer.stream == stream
            )
            copies_us = _copies_us(problem, head_us, tail_us, {stream: slowed})
            slowed_us = slowed * (wire_us - head_us - tail_us)
            bounds.append(head_us + total_us + copies_us + slowed_us + tail_us)
    for stream in range(len(problem.streams)):
        gathers = [g for g in problem.gathers if g.transfer.stream == stream]
        us = min((g.transfer.alpha_us for g in gathers), default=0.0)
        for gather in gathers:
            us += gather.wire_bytes * gather.transfer.us_per_byte
            left_us = total_us - elapsed[gather.first_use]
            bounds.append(us + left_us + (tail_us if left_us else 0.0))
        reductions = [r for r in problem.reductions if r.transfer.stream == stream]
        us = min((r.transfer.alpha_us for r in reductions), default=0.0)
        for reduction in reversed(reductions):
            us += reduction.wire_bytes * reduction.transfer.us_per_byte
            before_us = elapsed[reduction.ready]
            bounds.append(us + before_us + (head_us if before_us else 0.0))
    return max(bounds)


def _copies_us(problem: Problem, head_us: float, tail_us: float, slowed: dict[int, float]) -> float:
    """Copies as cheap as they can be, without what the waits of the head and of the tail may hide.

    Args:
        problem: of the schedules.
        head_us: the wait at the beginning.
        tail_us: that at the end.
        slowed: what a collective's latency costs the computation, as a part of it, by stream.
    """

    def least_us(item: GatherTask | ReductionTask) -> float:
        transfer = item.transfer
        above_us = transfer.us(item.wire_bytes) - item.wire_bytes * transfer.us_per_byte
        latency_us = above_us * slowed.get(transfer.stream, 0.0)
        alone_us = item.alone_in_us + item.alone_out_us + (latency_us if item.coalesced_us is None else 0.0)
        return min(alone_us, item.copy_in_us + item.copy_out_us)

    elapsed, in_head, in_tail, in_both = problem.elapsed_us, 0.0, 0.0, 0.0
    for gather in problem.gathers:
        if elapsed[gather.first_use] == problem.compute_us:
            in_both += least_us(gather)
        else:
            in_head += least_us(gather)
    for reduction in problem.reductions:
        if elapsed[reduction.ready] == 0.0:
            in_both += least_us(reduction)
        else:
            in_tail += least_us(reduction)
    in_both += min(in_head - head_us, 0.0) + min(in_tail - tail_us, 0.0)
    return max(in_head - head_us, 0.0) + max(in_tail - tail_us, 0.0) + max(in_both, 0.0)


def _at_once(items: Sequence[GatherTask | ReductionTask]) -> dict[int, float]:
    """The least time of each stream, were all of `items` sent as few collectives as possible."""
    found: dict[int, float] = defaultdict(float)
    latency: dict[tuple[int, int, str], float] = {}
    for item in items:
        found[item.transfer.stream] += item.wire_bytes * item.transfer.us_per_byte
        kind, then = ("reduce", item.then) if isinstance(item, ReductionTask) else ("gather", None)
        latency[item.transfer.stream, item.key, kind] = item.transfer.alpha_us
        if then is not None:
            found[then.stream] += item.shard_bytes * then.us_per_byte
            latency[then.stream, item.key, "then"] = then.alpha_us
    for (stream, _, _), alpha_us in latency.items():
        found[stream] += alpha_us
    return found
