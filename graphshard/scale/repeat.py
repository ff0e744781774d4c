"""The problem of a deep model from that of a shallow one: equal blocks are equal work.

A model is traced with a few blocks. Somewhere in the middle one block follows another as it would in a deeper model;
that block's operations, gathers and reductions are repeated. Nothing is assumed: two neighbouring blocks are compared
first, operation by operation. That all of a block's work is in its place is for `check_blocks` to see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from graphshard.planner import GatherTask, OwnCollective, Problem, ReductionTask
from graphshard.scale.blocks import NotRepeated

# Blocks to trace: the first and the last are next to something else; of the two between, one follows the other.
TRACED_BLOCKS = 4
# Ops are joined into one as long as they take less than this part of the program: as when a problem is read.
_GRAIN = 1 / 2000
_CLOSE = 1e-6


def repeated(problem: Problem, units: Sequence[str], layers: int, shard_bytes: int) -> Problem:
    """`problem`, whose blocks are `units`, as if there were `layers` of them.

    Args:
        problem: of a forward or a backward program.
        units: names of the units of its blocks, ``"layers.0"`` and so on, in the model's order.
        layers: number of blocks wanted, at least as many as there are.
        shard_bytes: of the parameters of one block, on one rank: arguments of the program from its beginning.

    Raises:
        NotRepeated: two neighbouring blocks differ.
    """
    starts: dict[str, int] = {}
    for gather in problem.gathers:  # in order of first use
        if gather.unit in units:
            starts.setdefault(gather.unit, gather.first_use)
    order = list(starts)
    if len(order) < max(TRACED_BLOCKS, len(units)):
        raise NotRepeated(f"{problem.direction} gathers {len(order)} of {len(units)} blocks, want at least 4 and all")
    kept = (len(order) - 1) // 2
    first, second, third = (starts[order[kept + i]] for i in range(3))
    period, extra = second - first, layers - len(order)
    step_bytes = _step_bytes(problem, first, second, third)
    # What is there from the beginning for each block more: its shards and, in backward, what forward saved for it.
    early_bytes = shard_bytes - min(step_bytes, 0)
    end, new_end = len(problem.ops), len(problem.ops) + extra * period
    prefix, _, start_number = order[0].rpartition(".")
    backwards = int(start_number) != 0
    names = [f"{prefix}.{layers - 1 - i if backwards else i}" for i in range(layers)]
    place = {unit: i for i, unit in enumerate(order)}

    def renamed(item: GatherTask | ReductionTask, copy: int) -> dict[str, str]:
        after = extra if place[item.unit] > kept else copy
        name = names[place[item.unit] + after]
        return {"unit": name, "fqn": name + item.fqn.removeprefix(item.unit)}

    def moved(position: int, by: int) -> int:
        return new_end if position == end else position + by

    def by_place(position: int) -> int:
        return moved(position, extra * period if position >= second else 0)

    def copies_of(item: GatherTask | ReductionTask) -> list[tuple[dict[str, str], Callable[[int], int]]]:
        """New name, and what becomes of a position, for each that becomes of `item`."""
        if item.unit not in place:
            return [({}, by_place)]
        if place[item.unit] > kept:
            return [(renamed(item, 0), lambda position: moved(position, extra * period))]
        count = extra if place[item.unit] == kept else 0
        return [
            (renamed(item, copy), lambda position, by=copy * period: moved(position, by))  # type: ignore[misc]
            for copy in range(count + 1)
        ]

    gathers = [
        replace(g, **name, first_use=to(g.first_use), last_use=to(g.last_use), ready=to(g.ready) if g.ready else 0)  # type: ignore[arg-type]
        for g in problem.gathers
        for name, to in copies_of(g)
    ]
    reductions = [
        replace(r, **name, ready=to(r.ready))  # type: ignore[arg-type]
        for r in problem.reductions
        for name, to in copies_of(r)
    ]
    own: list[OwnCollective] = []
    for collective in problem.own:
        later = collective.launch >= second
        copies = extra if first <= collective.launch < second else 0
        for copy in range(copies + 1):
            by = extra * period if later else copy * period
            name = collective.name + (f"#{copy}" if copy else "")
            launch, wait = collective.launch + by, moved(collective.wait, by)
            own.append(OwnCollective(name, collective.stream, collective.us, launch, wait))
    block = range(first, second)
    return replace(
        problem,
        ops=(
            *problem.ops[:second],
            *(f"{problem.ops[i]}#{copy}" for copy in range(1, extra + 1) for i in block),
            *problem.ops[second:],
        ),
        op_us=(*problem.op_us[:second], *problem.op_us[first:second] * extra, *problem.op_us[second:]),
        op_bytes=(
            *(num_bytes + extra * early_bytes for num_bytes in problem.op_bytes[:second]),
            *(
                problem.op_bytes[i] + extra * early_bytes + copy * step_bytes
                for copy in range(1, extra + 1)
                for i in block
            ),
            *(num_bytes + extra * (early_bytes + step_bytes) for num_bytes in problem.op_bytes[second:]),
        ),
        gathers=tuple(sorted(gathers, key=lambda gather: gather.first_use)),
        reductions=tuple(sorted(reductions, key=lambda reduction: reduction.ready)),
        own=tuple(sorted(own, key=lambda collective: collective.launch)),
    )


def _step_bytes(problem: Problem, first: int, second: int, third: int) -> int:
    """By how much the memory of a block differs from that of the one before it.

    Raises:
        NotRepeated: it does not everywhere by the same, or the blocks take different time.
    """
    if second - first != third - second:
        raise NotRepeated(f"blocks have {second - first} and {third - second} operations")
    period = second - first
    steps = set()
    for i in range(first, second):
        if abs(problem.op_us[i] - problem.op_us[i + period]) > _CLOSE * problem.op_us[i]:
            raise NotRepeated(
                f"{problem.ops[i]} takes {problem.op_us[i]:.3f} us, {problem.ops[i + period]} "
                f"{problem.op_us[i + period]:.3f} us"
            )
        steps.add(problem.op_bytes[i + period] - problem.op_bytes[i])
    if len(steps) != 1:
        raise NotRepeated(f"the memory of two blocks differs by {sorted(steps)[0]} to {sorted(steps)[-1]} bytes")
    return steps.pop()


def coarsened(problem: Problem) -> Problem:
    """The same with fewer ops: short ones are joined where nothing happens between them."""
    begins = {position for g in problem.gathers for position in (g.first_use, g.ready, g.last_use + 1)}
    begins |= {r.ready for r in problem.reductions} | {position for c in problem.own for position in (c.launch, c.wait)}
    grain = problem.compute_us * _GRAIN
    position: list[int] = []
    ops: list[str] = []
    op_us: list[float] = []
    op_bytes: list[int] = []
    for i, name in enumerate(problem.ops):
        if not ops or i in begins or op_us[-1] + problem.op_us[i] > grain:
            ops.append(name)
            op_us.append(0.0)
            op_bytes.append(0)
        position.append(len(ops) - 1)
        op_us[-1] += problem.op_us[i]
        op_bytes[-1] = max(op_bytes[-1], problem.op_bytes[i])
    position.append(len(ops))

    def last(of: int) -> int:
        return position[of]

    return replace(
        problem,
        ops=tuple(ops),
        op_us=tuple(op_us),
        op_bytes=tuple(op_bytes),
        gathers=tuple(
            replace(g, first_use=position[g.first_use], last_use=last(g.last_use), ready=position[g.ready])
            for g in problem.gathers
        ),
        reductions=tuple(replace(r, ready=position[r.ready]) for r in problem.reductions),
        own=tuple(replace(c, launch=position[c.launch], wait=position[c.wait]) for c in problem.own),
    )
