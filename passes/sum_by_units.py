"""Takes away the aliases by which activations enter units (`capture.unit_inputs`), but for those that can change a sum.

Needs: a graph as Dynamo captured it. Leaves: an alias where something else uses what it is an alias of.

    %a = alias(%x);  %y = mul(%a, %a);  return %y       ->    %y = mul(%x, %x);  return %y
    %a = alias(%x);  %y = mul(%a, %a);  return %y, %x   ->    the same

Behind an alias backward sums the gradients of its uses before it adds them to those of the others: (a + b) + c where it
had been a + (b + c). How many gradients a use brings, its operator does not say.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node

from graphshard.graph.ir import ALIAS, PassContext, is_call


@dataclass(frozen=True)
class SumsEdit:
    """Names of the aliases that change no sum."""

    dropped: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.dropped)


def decide(graph: Graph, ctx: PassContext) -> SumsEdit:
    """Finds aliases that nothing uses, or nothing beside which."""
    aliases = [node for node in graph.nodes if is_call(node, ALIAS)]
    unused = {node for node in aliases if not node.users}
    inner = ctx.direction == "inner"
    return SumsEdit(tuple(node.name for node in aliases if node in unused or not _has_others(node, unused, inner)))


def _has_others(alias: Node, unused: set[Node], inner: bool) -> bool:
    (source,) = alias.all_input_nodes
    if inner and source.op == "placeholder":  # around the graph it may have others
        return True
    return any(user is not alias and user not in unused for user in source.users)


def apply(graph: Graph, edit: SumsEdit) -> None:
    """Takes them away."""
    by_name = {node.name: node for node in graph.nodes}
    for name in edit.dropped:
        alias = by_name[name]
        alias.replace_all_uses_with(alias.all_input_nodes[0])
        graph.erase_node(alias)
