"""How fast any schedule could be: what a plan is measured against.

The greatest of several times that no schedule can beat: computation with the head and the tail that nothing can hide;
what each gather has to wait for, then the computation behind it; the computation in front of each reduction, then what
is left to reduce; and the communication of each process group. Latencies are counted once for each kind of collective,
copies as cheap as they can be, hidden where something is awaited anyway, and memory is not limited.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from graphshard.planner.problem import Gather, Problem, Reduction


def lower_bound_us(problem: Problem) -> float:
    """No schedule of `problem` takes less."""
    elapsed, total_us = problem.elapsed_us, problem.compute_us
    head_us = max(_at_once([g for g in problem.gathers if elapsed[g.first_use] == 0.0]).values(), default=0.0)
    tail_us = max(_at_once([r for r in problem.reductions if elapsed[r.ready] == total_us]).values(), default=0.0)
    busy = _at_once([*problem.gathers, *problem.reductions])
    for own in problem.own:
        busy[own.stream] += own.us
    busiest_us = max(busy.values(), default=0.0)
    bounds = [busiest_us, head_us, tail_us]
    if total_us:
        # While a collective is under way, computation is slower: it makes up for that behind or before.
        slowed = problem.contention / (1.0 + problem.contention)
        slowed_us = slowed * max(0.0, busiest_us - head_us - tail_us)
        bounds.append(head_us + total_us + _copies_us(problem, head_us, tail_us) + slowed_us + tail_us)
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


def _copies_us(problem: Problem, head_us: float, tail_us: float) -> float:
    """Copies as cheap as they can be, without what the waits of the head and of the tail may hide."""
    elapsed, in_head, in_tail, in_both = problem.elapsed_us, 0.0, 0.0, 0.0
    for gather in problem.gathers:
        us = min(gather.alone_in_us + gather.alone_out_us, gather.copy_in_us + gather.copy_out_us)
        if elapsed[gather.first_use] == problem.compute_us:
            in_both += us
        else:
            in_head += us
    for reduction in problem.reductions:
        us = min(reduction.alone_in_us + reduction.alone_out_us, reduction.copy_in_us + reduction.copy_out_us)
        if elapsed[reduction.ready] == 0.0:
            in_both += us
        else:
            in_tail += us
    in_both += min(in_head - head_us, 0.0) + min(in_tail - tail_us, 0.0)
    return max(in_head - head_us, 0.0) + max(in_tail - tail_us, 0.0) + max(in_both, 0.0)


def _at_once(items: Sequence[Gather | Reduction]) -> dict[int, float]:
    """The least time of each stream, were all of `items` sent as few collectives as possible."""
    found: dict[int, float] = defaultdict(float)
    latency: dict[tuple[int, int, str], float] = {}
    for item in items:
        found[item.transfer.stream] += item.wire_bytes * item.transfer.us_per_byte
        kind, then = ("reduce", item.then) if isinstance(item, Reduction) else ("gather", None)
        latency[item.transfer.stream, item.key, kind] = item.transfer.alpha_us
        if then is not None:
            found[then.stream] += item.shard_bytes * then.us_per_byte
            latency[then.stream, item.key, "then"] = then.alpha_us
    for (stream, _, _), alpha_us in latency.items():
        found[stream] += alpha_us
    return found
