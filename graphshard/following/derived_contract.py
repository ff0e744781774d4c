"""A contract for a state of a call, made of one for another state of it: without a graph, by a rank that has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from graphshard.agree.contract import Contract
from graphshard.graph.plan import PlannedBucket
from graphshard.state.binding import Binding
from graphshard.state.shards import RESIDENT, Shard
from graphshard.state.unit_state import REACHED, UnitState


def derived(
    base: Contract | None,
    binding: Binding,
    states: Sequence[UnitState],
    backward: bool,
    needed: frozenset[str] | None = None,
) -> Contract:
    """The buckets of `base`, as far as they are wanted; what it lacks is gathered first and reduced last, by unit.

    Every rank can do that, whatever its graph is: gathers are never too early, reductions never too late.

    Args:
        base: of another state; None: there is none.
        binding: the whole call.
        states: of its units.
        backward: whether it is about a backward.
        needed: FQNs of what it gathers if all is sharded; None: all.
    """
    gathered: dict[str, Shard] = {}
    reduced: dict[str, Shard] = {}
    for unit, slots, state in zip(binding.units, binding.slots, states, strict=True):
        for shard, bits in zip((binding.shards[i] for i in slots), state.slots or (REACHED,) * len(slots), strict=True):
            if not bits & RESIDENT and unit.world_size > 1 and (needed is None or shard.fqn in needed):
                gathered[shard.fqn] = shard
            moves = unit.world_size * unit.replicas > 1 and state.reduces
            if backward and shard.leaf.requires_grad and bits & REACHED and moves:
                reduced[shard.fqn] = shard
    known = () if base is None else base.buckets
    seen = {(bucket.kind, fqn) for bucket in known for fqn in bucket.members}
    kept = []
    for bucket in known:
        wanted = gathered if bucket.kind == "gather" else reduced
        if members := tuple(fqn for fqn in bucket.members if fqn in wanted):
            kept.append(replace(bucket, members=members))
    more = {fqn: shard for fqn, shard in gathered.items() if ("gather", fqn) not in seen}
    last = {fqn: shard for fqn, shard in reduced.items() if ("reduce", fqn) not in seen}
    buckets = (*_by_unit("gather", more), *kept, *_by_unit("reduce", last))
    names = {bucket.name for bucket in kept}
    steps = () if more or last or base is None else tuple(step for step in base.steps if step.bucket in names)
    if base is None:
        return Contract(buckets, steps, (), "derived")
    return Contract(buckets, steps, base.params, "derived", base.without)


def _by_unit(kind: Literal["gather", "reduce"], shards: dict[str, Shard]) -> list[PlannedBucket]:
    groups: dict[tuple[object, ...], list[str]] = {}
    for fqn, shard in shards.items():
        groups.setdefault((shard.unit.name, shard.param.reduce_dtype, shard.leaf.dtype), []).append(fqn)
    return [
        PlannedBucket(f"{kind}:{unit or 'root'}#derived{number}", kind, tuple(fqns))
        for number, ((unit, *_), fqns) in enumerate(groups.items())
    ]
