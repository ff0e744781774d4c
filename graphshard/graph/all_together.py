"""The plan of a program that does nothing but gather or reduce whole units: few collectives."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from torch.fx import Graph, Node

from graphshard.graph.ir import PassContext, bucket_key, member_names, reductions, unshards
from graphshard.graph.plan import PlannedBucket, ProgramPlan, bucket_name


def all_together(graph: Graph, ctx: PassContext) -> ProgramPlan:
    """A plan in which all that can share a bucket does."""
    taken: Counter[str] = Counter()
    buckets: list[PlannedBucket] = []
    kinds: tuple[tuple[Literal["gather", "reduce"], list[Node]], ...] = (
        ("gather", unshards(graph)),
        ("reduce", reductions(graph)),
    )
    for kind, markers in kinds:
        groups: dict[tuple[object, ...], list[str]] = {}
        for name, node in member_names(markers, ctx).items():
            groups.setdefault(bucket_key(node, ctx), []).append(name)
        for members in groups.values():
            units = dict.fromkeys(param.unit for param in ctx.params.values() if param.fqn in members)
            buckets.append(PlannedBucket(bucket_name(kind, list(units), taken), kind, tuple(members)))
    return ProgramPlan(tuple(buckets), ())
