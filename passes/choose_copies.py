"""Decides which buckets are sent as they are: one collective takes their tensors one by one, and no buffer is filled.

Needs: markers with ``meta["bucket"]``, and `PassContext.coalesces`, which weighs copies against what each more tensor
adds to a collective. Leaves: ``meta["coalesced"]`` on the markers of these buckets. A bucket of one needs no choice:
its tensor is sent itself where it has the right dtype. Flat stays what has no costs: programs of a unit outside
regions, and those of units that say what they prefetch.

    bucket "gather:layers.0": %a = unshard(%s0), %b = unshard(%s1)   ->   the same, coalesced

Source: the coalesced collectives of c10d, which NCCL runs as one group.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch.fx import Graph, Node

from graphshard.graph.ir import PassContext, member_names, reductions, unshards


@dataclass(frozen=True)
class CopiesEdit:
    """(bucket, its markers) of every bucket that is coalesced."""

    coalesced: tuple[tuple[str, tuple[str, ...]], ...]

    def __bool__(self) -> bool:
        return bool(self.coalesced)


def decide(graph: Graph, ctx: PassContext) -> CopiesEdit:
    """Asks for every bucket of several."""
    if ctx.coalesces is None:
        return CopiesEdit(())
    found = []
    for kind, markers in (("gather", unshards(graph)), ("reduce", reductions(graph))):
        buckets: dict[str, list[tuple[str, Node]]] = defaultdict(list)
        for name, node in member_names(markers, ctx).items():
            if "bucket" in node.meta and "coalesced" not in node.meta:
                buckets[node.meta["bucket"][0]].append((name, node))
        for bucket, members in buckets.items():
            if ctx.coalesces(kind, [name for name, _ in members]):
                found.append((bucket, tuple(node.name for _, node in members)))
    return CopiesEdit(tuple(found))


def apply(graph: Graph, edit: CopiesEdit) -> None:
    """Writes it on the markers."""
    names = {name for _, markers in edit.coalesced for name in markers}
    for node in graph.nodes:
        if node.name in names:
            node.meta["coalesced"] = True
