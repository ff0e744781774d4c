"""Decides which gathers and which reductions become one collective: one bucket per unit, in FSDP2's parameter order.

Needs: a forward, backward or inference graph with markers. Leaves: ``meta["bucket"]`` on every marker. A bucket has
one process group; gradients of one bucket have one dtype, gathered parameters of several dtypes share one as bytes.

    %a = unshard(%s0)   ->   bucket "gather:layers.0"
    %b = unshard(%s1)   ->   bucket "gather:layers.0"

Source: FSDP2's parameter groups; the same membership and order gives the same number of collectives as eager.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch.fx import Graph, Node

from graphshard.ir import PassContext, bucket_key, reductions, shard_placeholder, unshards


@dataclass(frozen=True)
class BucketsEdit:
    """(bucket, its markers in bucket order) for each bucket."""

    buckets: tuple[tuple[str, tuple[str, ...]], ...]

    def __bool__(self) -> bool:
        return bool(self.buckets)


def decide(graph: Graph, ctx: PassContext) -> BucketsEdit:
    """Groups the markers that have no bucket yet."""
    groups: dict[tuple[object, ...], list[Node]] = defaultdict(list)
    for node in [*unshards(graph), *reductions(graph)]:
        if "bucket" not in node.meta:
            groups[bucket_key(node, ctx)].append(node)
    names: dict[str, int] = defaultdict(int)
    buckets = []
    for (kind, unit, *_), nodes in groups.items():
        nodes.sort(key=lambda node: ctx.params[shard_placeholder(node).name].index)
        name = f"{kind}:{unit or 'root'}"
        names[name] += 1
        suffix = f"#{names[name]}" if names[name] > 1 else ""
        buckets.append((name + suffix, tuple(node.name for node in nodes)))
    return BucketsEdit(tuple(buckets))


def apply(graph: Graph, edit: BucketsEdit) -> None:
    """Writes each marker's bucket and its place in it."""
    by_name = {node.name: node for node in graph.nodes}
    for bucket, names in edit.buckets:
        for place, name in enumerate(names):
            by_name[name].meta["bucket"] = (bucket, place)
