"""Tells the partitioner to gather parameters again in backward, never to save what was gathered.

Needs: a joint graph with markers, duplicates folded. Leaves: every unshard tagged. Without a tag the partitioner would
save the gathered value. A marker covers cast, gather and copy-out, so one tag decides all of it.

    %a = unshard(%s, ...)   ->   the same, meta["recompute"] = MUST_RECOMPUTE

Whether a unit reshards after forward is a flag that may change between two steps, so it must not shape a graph: what
stays gathered is handed from the forward program to the backward program as an argument of both (see `apply_flags`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph

from graphshard.compat import tag_reshard
from graphshard.ir import PassContext, unshards

_DONE = "reshard_tagged"


@dataclass(frozen=True)
class ReshardEdit:
    """Names of unshards to tag."""

    again: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.again)


def decide(graph: Graph, ctx: PassContext) -> ReshardEdit:
    """Finds the unshards that are not tagged yet."""
    return ReshardEdit(tuple(node.name for node in unshards(graph) if _DONE not in node.meta))


def apply(graph: Graph, edit: ReshardEdit) -> None:
    """Tags what `edit` names."""
    again = set(edit.again)
    for node in unshards(graph):
        if node.name in again:
            tag_reshard(node)
            node.meta[_DONE] = True
