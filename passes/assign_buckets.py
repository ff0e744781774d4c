"""Decides which gathers and which reductions become one collective: as the planner says, or one bucket per unit.

Needs: a forward, backward or inference graph with markers. Leaves: ``meta["bucket"]`` on every marker and, where there
is a planner, ``meta["steps"]``: when its bucket is launched and awaited. A bucket has one process group; gradients of
one bucket have one dtype, gathered parameters of several dtypes share one as bytes.

    %a = unshard(%s0)   ->   bucket "gather:layers.0"
    %b = unshard(%s1)   ->   bucket "gather:layers.0"

Source: without a planner, FSDP2's parameter groups; the same membership and order gives the same number of collectives
as eager.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch.fx import Graph, Node

from graphshard.graph.ir import PassContext, bucket_key, member_names, reductions, shard_placeholder, unshards
from graphshard.graph.plan import PlannedStep, ProgramPlan


@dataclass(frozen=True)
class BucketsEdit:
    """(bucket, its markers in bucket order) for each bucket, and all their steps in program order."""

    buckets: tuple[tuple[str, tuple[str, ...]], ...]
    steps: tuple[PlannedStep, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.buckets)


def decide(graph: Graph, ctx: PassContext) -> BucketsEdit:
    """Groups the markers that have no bucket yet."""
    markers = [node for node in [*unshards(graph), *reductions(graph)] if "bucket" not in node.meta]
    planned = ctx.planner(graph, ctx) if ctx.planner is not None and markers else None
    edit = BucketsEdit(()) if planned is None else _as_planned(graph, ctx, planned)
    bucketed = {name for _, names in edit.buckets for name in names}
    groups: dict[tuple[object, ...], list[Node]] = defaultdict(list)
    for node in markers:
        if node.name not in bucketed:
            kind, *key = bucket_key(node, ctx)
            groups[kind, ctx.params[shard_placeholder(node).name].unit, *key].append(node)
    names: dict[str, int] = defaultdict(int)
    buckets = list(edit.buckets)
    for (kind, unit, *_), nodes in groups.items():
        nodes.sort(key=lambda node: ctx.params[shard_placeholder(node).name].index)
        name = f"{kind}:{unit or 'root'}"
        names[name] += 1
        suffix = f"#{names[name]}" if names[name] > 1 else ""
        buckets.append((name + suffix, tuple(node.name for node in nodes)))
    return BucketsEdit(tuple(buckets), edit.steps)


def _as_planned(graph: Graph, ctx: PassContext, plan: ProgramPlan) -> BucketsEdit:
    markers = {"gather": member_names(unshards(graph), ctx), "reduce": member_names(reductions(graph), ctx)}
    buckets = [
        (bucket.name, tuple(markers[bucket.kind][member].name for member in bucket.members)) for bucket in plan.buckets
    ]
    return BucketsEdit(tuple(buckets), plan.steps)


def apply(graph: Graph, edit: BucketsEdit) -> None:
    """Writes each marker's bucket, its place in it, and the steps of the bucket."""
    by_name = {node.name: node for node in graph.nodes}
    steps: dict[str, list[tuple[int, str, str]]] = defaultdict(list)
    for number, step in enumerate(edit.steps):
        steps[step.bucket].append((number, step.step, step.before))
    for bucket, names in edit.buckets:
        for place, name in enumerate(names):
            by_name[name].meta["bucket"] = (bucket, place)
            if bucket in steps:
                by_name[name].meta["steps"] = tuple(steps[bucket])
