"""How fast any schedule could be: what a plan is measured against.

The greatest of several times that no schedule can beat: computation with the head and the tail that nothing can hide;
what each gather has to wait for, then the computation behind it; the computation in front of each reduction, then what
is left to reduce; and the communication of each process group. Latencies are counted once for each kind of collective,
copies as cheap as they can be, and memory is not limited.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from graphshard.planner.problem import Gather, Problem, Reduction


def lower_bound_us(problem: Problem) -> float:
    """No schedule of `problem` takes less."""
    elapsed, total = problem.elapsed_us, problem.compute_us
    copies_us = sum(min(g.alone_in_us + g.alone_out_us, g.copy_in_us + g.copy_out_us) for g in problem.gathers)
    copies_us += sum(min(r.alone_in_us + r.alone_out_us, r.copy_in_us + r.copy_out_us) for r in problem.reductions)
    first = [g for g in problem.gathers if elapsed[g.first_use] == 0.0]
    last = [r for r in problem.reductions if elapsed[r.ready] == total]
    head_us = max(_at_once(first).values(), default=0.0)
    tail_us = max(_at_once(last).values(), default=0.0)
    busy = _at_once(problem.gathers)
    for stream, us in _at_once(problem.reductions).items():
        busy[stream] += us
    for own in problem.own:
        busy[own.stream] += own.us
    busiest_us = max(busy.values(), default=0.0)
    # While a collective is under way, computation is slower: it makes up for that behind or before.
    slowed = problem.contention / (1.0 + problem.contention)
    computed_us = total + copies_us + slowed * max(0.0, busiest_us - head_us - tail_us)
    bounds = [busiest_us, head_us + computed_us + tail_us]
    for gathers in _by_stream(problem.gathers).values():
        us = max(0.0, min(g.transfer.alpha_us for g in gathers))
        for gather in gathers:
            us += gather.wire_bytes * gather.transfer.us_per_byte
            bounds.append(us + total - elapsed[gather.first_use] + tail_us)
    for reductions in _by_stream(problem.reductions).values():
        us = min(r.transfer.alpha_us for r in reductions)
        for reduction in reversed(reductions):
            us += reduction.wire_bytes * reduction.transfer.us_per_byte
            bounds.append(head_us + elapsed[reduction.ready] + us)
    return max(bounds)


def _by_stream(items: Sequence[Gather] | Sequence[Reduction]) -> dict[int, list[Gather | Reduction]]:
    found: dict[int, list[Gather | Reduction]] = defaultdict(list)
    for item in items:
        found[item.transfer.stream].append(item)
    return found


def _at_once(items: Sequence[Gather] | Sequence[Reduction]) -> dict[int, float]:
    """The least time of each stream, were all of `items` sent as few collectives as possible."""
    found: dict[int, float] = defaultdict(float)
    latency: dict[tuple[int, int, int], float] = {}
    for item in items:
        found[item.transfer.stream] += item.wire_bytes * item.transfer.us_per_byte
        latency[item.transfer.stream, item.key, 0] = item.transfer.alpha_us
        then = item.then if isinstance(item, Reduction) else None
        if then is not None:
            found[then.stream] += item.shard_bytes * then.us_per_byte
            latency[then.stream, item.key, 1] = then.alpha_us
    for (stream, _, _), alpha_us in latency.items():
        found[stream] += alpha_us
    return found
