"""Tells the partitioner to gather parameters again in backward, never to save what was gathered.

Needs: a joint graph with markers, duplicates folded. Leaves: every unshard tagged, and every view of one. Without a tag
the partitioner would save the gathered value. A marker covers cast, gather and copy-out, so one tag decides all of it.

    %a = unshard(%s, ...)   ->   the same, meta["recompute"] = MUST_RECOMPUTE

Whether a unit reshards after forward is a flag that may change between two steps, so it must not shape a graph: what
stays gathered is handed from the forward program to the backward program as an argument of both (see `apply_flags`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph

from graphshard.compat import tag_reshard
from graphshard.ir import PassContext, may_view, unshards

_DONE = "reshard_tagged"


@dataclass(frozen=True)
class ReshardEdit:
    """Names of unshards, and of views of them, to tag."""

    again: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.again)


def decide(graph: Graph, ctx: PassContext) -> ReshardEdit:
    """Finds what is not tagged yet."""
    found = list(unshards(graph))
    for node in found:  # grows: a part of a view is a view too
        found += [user for user in node.users if may_view(user) and user.args[0] is node]
    return ReshardEdit(tuple(node.name for node in found if _DONE not in node.meta))


def apply(graph: Graph, edit: ReshardEdit) -> None:
    """Tags what `edit` names."""
    again = set(edit.again)
    for node in graph.nodes:
        if node.name in again:
            tag_reshard(node)
            node.meta[_DONE] = True
