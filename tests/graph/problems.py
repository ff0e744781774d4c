"""Problems for the planner: random small ones, and stacks of equal blocks."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import strategies as st

from graphshard.planner import GatherTask, OwnCollective, Problem, ReductionTask, Transfer

US = st.integers(0, 40).map(float)
BYTES = st.integers(1, 60)


@st.composite
def problems(
    draw: st.DrawFn, most: int = 6, contention: bool = True, own: bool = True, reductions: bool = True
) -> Problem:
    """At most `most` gathers, and as many reductions, of one or two streams and keys, in units of neighbours."""
    ops = draw(st.integers(1, 10))
    streams, coalesces = draw(st.integers(1, 2)), draw(st.booleans())
    transfers = [Transfer(draw(st.integers(0, streams - 1)), draw(rates())) for _ in range(3)]
    uses = sorted(draw(st.lists(st.integers(0, ops), max_size=most)))
    gathers = []
    for i, use in enumerate(uses):
        key = draw(st.integers(0, 1))
        alone, wire = draw(st.booleans()), draw(BYTES)
        gathers.append(
            GatherTask(
                fqn=f"w{i}",
                unit=f"u{i // 2}",
                key=key,
                transfer=transfers[key],
                wire_bytes=wire,
                full_bytes=draw(st.integers(1, wire)),
                first_use=use,
                last_use=draw(st.integers(use, ops)),
                ready=draw(st.integers(0, use)) if draw(st.booleans()) else 0,
                copy_in_us=draw(US) / 10,
                copy_out_us=draw(US) / 10,
                alone_in_us=draw(US) / 20,
                alone_out_us=draw(US) / 10 if alone else 0.0,
                alone_out_bytes=wire if alone else 0,
                shard_bytes=max(1, wire // 2),
                coalesced_us=draw(US) / 20 if coalesces else None,
            )
        )
    ready = sorted(draw(st.lists(st.integers(0, ops), max_size=most))) if reductions else []
    copies = draw(st.booleans())
    reduced = [
        ReductionTask(
            fqn=f"w{i}",
            unit=f"u{i // 2}",
            key=2,
            transfer=transfers[2],
            wire_bytes=draw(BYTES),
            grad_bytes=draw(BYTES),
            shard_bytes=draw(st.integers(1, 9)),
            ready=at,
            then=Transfer(0, ((3.0, 0.1),)) if copies else None,
            copy_in_us=draw(US) / 10,
            copy_out_us=draw(US) / 10,
            alone_in_us=draw(US) / 20,
            alone_out_us=draw(US) / 10,
            coalesced_us=draw(US) / 20 if coalesces and not copies else None,
        )
        for i, at in enumerate(ready)
    ]
    owns = []
    for i, launch in enumerate(sorted(draw(st.lists(st.integers(0, ops), max_size=2))) if own else []):
        owns.append(OwnCollective(f"c{i}", 0, draw(US), launch, draw(st.integers(launch, ops))))
    return Problem(
        direction="backward",
        ops=tuple(f"op{i}" for i in range(ops)),
        op_us=tuple(draw(US) for _ in range(ops)),
        op_bytes=tuple(draw(st.integers(0, 100)) for _ in range(ops)),
        gathers=tuple(gathers),
        reductions=tuple(reduced),
        own=tuple(owns),
        streams=tuple(f"group{i}" for i in range(streams)),
        contention=draw(st.sampled_from((0.0, 0.1, 0.5))) if contention else 0.0,
        launch_us=draw(st.sampled_from((0.0, 1.0))),
    )


@st.composite
def rates(draw: st.DrawFn) -> tuple[tuple[float, float], ...]:
    """One or two protocols: a short latency at a low rate, a long one at a high rate."""
    alpha_us, us_per_byte = draw(st.integers(0, 20)), draw(st.integers(0, 10)) / 10
    slow = (float(alpha_us), us_per_byte)
    return (slow, (alpha_us + 5.0, us_per_byte / 2)) if draw(st.booleans()) else (slow,)


def stack(
    blocks: int, backward: bool = False, alpha_us: float = 20.0, op_us: float = 100.0, ramp_bytes: int = 5000
) -> Problem:
    """Equal blocks of a small and two large parameters between an embedding and a head.

    What is saved for backward grows, and shrinks again, by `ramp_bytes` in all.
    """
    transfer = Transfer(0, ((alpha_us, 0.1),))
    sizes = [("norm", 10), ("up", 1000), ("down", 1200)]
    layers = [(f"l{i}", f"l{i}.{name}", size) for i in range(blocks) for name, size in sizes]
    members = [("", "embed", 2000), *layers, ("", "head", 2000)]
    ops, times, gathers, reductions = list[str](), list[float](), list[GatherTask](), list[ReductionTask]()
    for unit, fqn, size in reversed(members) if backward else members:
        us = op_us * size / 1000
        gathers.append(
            GatherTask(
                fqn, unit, 0, transfer, size, size, len(ops), len(ops), 0, 0.2, 1 + size / 400, 0.2, shard_bytes=size
            )
        )
        ops.append(f"{fqn}.x")
        times.append(us)
        if backward:
            ops.append(f"{fqn}.w")
            times.append(us)
            more = 0.2 + size / 500
            reductions.append(
                ReductionTask(fqn, unit, 1, transfer, 2 * size, size, size // 8, len(ops), None, more, 0.1, more, 0.1)
            )
    saved = [int(x) for x in accumulate([ramp_bytes / len(ops)] * len(ops))]
    direction = "backward" if backward else "forward"
    saved = saved[::-1] if backward else saved
    return Problem(direction, tuple(ops), tuple(times), tuple(saved), tuple(gathers), tuple(reductions))
