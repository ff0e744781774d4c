"""Tells the partitioner to gather parameters again in backward, never to save what was gathered, and to reduce there.

Needs: a joint graph with markers, duplicates folded. Leaves: every unshard tagged, and every view and cast of one, such
as autocast's. Without a tag the partitioner would save the gathered value, or all of it in another dtype. A marker
covers cast, gather and copy-out, so one tag decides all of it.

    %a = unshard(%s, ...)   ->   the same, meta["recompute"] = MUST_RECOMPUTE

A parameter that no gradient is computed from, as a bias, is needed in backward only where the partitioner computes its
sum anew, which depends on sizes: ranks with other shapes would gather other parameters. So what is computed from such
a parameter is saved, if it is needed.

    %b = add(%x, %a)    ->   the same, meta["recompute"] = MUST_SAVE

A gradient may be the same whatever comes from outputs, as the zeros of a batch without rows. Backward reduces it, too.

    %g = reduce_grad(%zeros, ...)   ->   the same, meta["partitioner_tag"] = "must_be_in_backward"

Whether a unit reshards after forward is a flag that may change between two steps, so it must not shape a graph: what
stays gathered is handed from the forward program to the backward program, as a result of the one and an argument of the
other (see `apply_residency`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node

from graphshard.compat.partitioner import is_tagged_backward, tag_backward, tag_reshard, tag_saved
from graphshard.graph.ir import PassContext, is_cast, is_tangent, may_view, reductions, unshards

_DONE = "reshard_tagged"


@dataclass(frozen=True)
class ReshardEdit:
    """Names of unshards, and of views and casts of them, to gather again; of what is not to be computed again; of
    reductions that only a tag keeps in backward.
    """

    again: tuple[str, ...]
    once: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.again or self.once or self.behind)


def decide(graph: Graph, ctx: PassContext) -> ReshardEdit:
    """Finds what is not tagged yet."""
    in_backward = _in_backward(graph)
    found, once = [], []
    for unshard in unshards(graph):
        views = _views(unshard)
        found += views
        users = [user for view in views for user in view.users if user not in views and user.op != "output"]
        if in_backward and in_backward.isdisjoint(users):
            # What a checkpoint computes again, it does on every rank.
            once += [user for user in users if "recompute" not in user.meta]
    behind = (node for node in reductions(graph) if node not in in_backward and not is_tagged_backward(node))
    return ReshardEdit(
        tuple(node.name for node in found if _DONE not in node.meta),
        tuple(node.name for node in dict.fromkeys(once)),
        tuple(node.name for node in behind),
    )


def _views(unshard: Node) -> list[Node]:
    found = [unshard]
    for node in found:  # grows: a part of a view is a view too
        found += [user for user in node.users if (may_view(user) or is_cast(user)) and user.args[0] is node]
    return found


def _in_backward(graph: Graph) -> set[Node]:
    """What depends on gradients of outputs."""
    found = set[Node]()
    for node in graph.nodes:
        if is_tangent(node) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def apply(graph: Graph, edit: ReshardEdit) -> None:
    """Tags what `edit` names."""
    again, once, behind = set(edit.again), set(edit.once), set(edit.behind)
    for node in graph.nodes:
        if node.name in again:
            tag_reshard(node)
            node.meta[_DONE] = True
        elif node.name in once:
            tag_saved(node)
        elif node.name in behind:
            tag_backward(node)
