"""One unshard for all reads of a parameter in a forward, so that a write into it is seen by the reads behind it.

Needs: a graph as Dynamo captured it, not yet functional. Leaves: every read of a parameter refers to one of them.

    %a = unshard(%s)                       %a = unshard(%s)
    %_ = clamp_(%a, max=1)          ->     %_ = clamp_(%a, max=1)
    %b = unshard(%s);  %y = exp(%b)        %y = exp(%a)

Eager FSDP2 has one unsharded parameter per forward: what a forward writes into it, it reads again, and backward sums
the gradients of all reads before it reduces. Where the first read is under `no_grad`, and a later one needs a gradient,
that one moves before it: fake values say whether they need one. What a tensor subclass makes of its unshard (see
`extensions`) is shared likewise.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node

from graphshard.compat.dynamo import sets_grad_mode
from graphshard.graph.extensions import EXTENDED
from graphshard.graph.ir import PassContext, is_call
from graphshard.graph.markers import UNSHARD


@dataclass(frozen=True)
class SharedRead:
    """`kept` serves `dropped` too; it moves before `anchor` unless that is None."""

    kept: str
    dropped: tuple[str, ...]
    anchor: str | None


@dataclass(frozen=True)
class ReadsEdit:
    """Every parameter that is read more than once."""

    reads: tuple[SharedRead, ...]

    def __bool__(self) -> bool:
        return bool(self.reads)


def decide(graph: Graph, ctx: PassContext) -> ReadsEdit:
    """Groups the unshards by what they read."""
    groups: dict[str, list[tuple[Node, Node | None]]] = {}
    switched_off: Node | None = None  # the node that switched gradients off; None: they are on
    for node in graph.nodes:
        if (enabled := sets_grad_mode(node)) is not None:
            switched_off = None if enabled else switched_off or node
        elif is_call(node, UNSHARD):
            groups.setdefault(repr(node.args), []).append((node, switched_off))
        elif is_call(node, EXTENDED):  # by its shard: another unshard, that is shared, is an argument of each
            groups.setdefault(f"extended {node.args[0]}", []).append((node, switched_off))
    reads = []
    for group in groups.values():
        if len(group) > 1:
            first, off = group[0]
            kept = next((read for read, read_off in group if read_off is None), first)
            anchor = None if off is None or kept is first else off.name
            reads.append(SharedRead(kept.name, tuple(read.name for read, _ in group if read is not kept), anchor))
    return ReadsEdit(tuple(reads))


def apply(graph: Graph, edit: ReadsEdit) -> None:
    """Makes every read refer to the one that is kept."""
    by_name = {node.name: node for node in graph.nodes}
    for read in edit.reads:
        kept = by_name[read.kept]
        if read.anchor is not None:
            by_name[read.anchor].prepend(kept)
        for name in read.dropped:
            by_name[name].replace_all_uses_with(kept)
            graph.erase_node(by_name[name])
