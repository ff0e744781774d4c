"""Tells the partitioner, for each gathered parameter, to save it for backward or to gather it again there.

Needs: a joint graph with markers, duplicates folded. Leaves: every unshard tagged by its own spec. Without a tag the
partitioner would save the gathered value. A marker covers cast, gather and copy-out, so one tag decides all of it.

    %a = unshard(%s, '...|reshard')   ->   the same, meta["recompute"] = MUST_RECOMPUTE

With one rank nothing is gathered: unsharding again costs a cast at most, saving it costs memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph

from graphshard.compat import tag_reshard
from graphshard.ir import PassContext, spec_of, unshards


@dataclass(frozen=True)
class ReshardEdit:
    """Names of unshards whose value is gathered again in backward, and of those that are saved."""

    again: tuple[str, ...]
    save: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.again or self.save)


def decide(graph: Graph, ctx: PassContext) -> ReshardEdit:
    """Reads each marker's own policy."""
    again: list[str] = []
    save: list[str] = []
    for node in unshards(graph):
        if "reshard_tagged" not in node.meta:
            spec = spec_of(node)
            (again if spec.reshard or spec.world_size == 1 else save).append(node.name)
    return ReshardEdit(tuple(again), tuple(save))


def apply(graph: Graph, edit: ReshardEdit) -> None:
    """Tags what `edit` names."""
    again, save = set(edit.again), set(edit.save)
    for node in unshards(graph):
        if node.name in again or node.name in save:
            tag_reshard(node, reshard=node.name in again)
            node.meta["reshard_tagged"] = True
