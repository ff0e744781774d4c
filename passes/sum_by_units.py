"""Takes away the aliases by which activations enter units (`capture.unit_inputs`), but for those that change a sum.

Needs: a graph as Dynamo captured it. Leaves: an alias where a unit uses an activation more than once and something else
uses it, too.

    %a = alias(%x);  %y = relu(%a);  return %y       ->    %y = relu(%x);  return %y
    %a = alias(%x);  %y = mul(%a, %a);  return %y, %x  ->    the same

Behind an alias backward sums the gradients of its uses before it adds them to those of the others: (a + b) + c where it
had been a + (b + c).
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from operator import attrgetter

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from graphshard.graph.ir import PassContext, is_call
from graphshard.graph.markers import ALIAS

# An operator that runs a graph may use what it takes as often.
_OFTEN = 2


@dataclass(frozen=True)
class SumsEdit:
    """Names of the aliases that change no sum."""

    dropped: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.dropped)


def decide(graph: Graph, ctx: PassContext) -> SumsEdit:
    """Looks at the last first: one that is dropped leaves its uses to what it is an alias of."""
    dropped: set[Node] = set()
    for node in reversed(graph.nodes):
        if is_call(node, ALIAS) and not _changes_a_sum(node, dropped, ctx.direction == "inner"):
            dropped.add(node)
    return SumsEdit(tuple(node.name for node in graph.nodes if node in dropped))


def _changes_a_sum(alias: Node, dropped: Set[Node], inner: bool) -> bool:
    (source,) = alias.all_input_nodes
    uses = _uses(alias, dropped)
    others = _uses(source, dropped | {alias}) - uses
    goes_on = any(user.op == "output" for user in alias.users)  # in a later graph
    if source.op == "placeholder" and (inner or goes_on):
        others += 1
    twice = any(beside.args == alias.args for beside in _beside(alias))
    return others > 0 and (twice or goes_on or uses > 1)


def _uses(node: Node, dropped: Set[Node]) -> int:
    """How many gradients of a node are summed."""
    found = 0
    for user in node.users:
        if user in dropped:
            found += _uses(user, dropped)
        elif any(_is_graph(read) for read in user.all_input_nodes):
            found += _OFTEN
        else:
            found += _times(user, node)
    return found


def _times(user: Node, node: Node) -> int:
    flat: list[Node] = []
    map_arg((user.args, user.kwargs), lambda read: flat.append(read))
    return flat.count(node)


def _is_graph(node: Node) -> bool:
    owner: object = node.graph.owning_module
    return node.op == "get_attr" and isinstance(getattr(owner, str(node.target), None), GraphModule)


def _beside(alias: Node) -> Iterator[Node]:
    """Aliases of the same call."""
    for step in map(attrgetter, ("prev", "next")):
        node = step(alias)
        while is_call(node, ALIAS):
            yield node
            node = step(node)


def apply(graph: Graph, edit: SumsEdit) -> None:
    """Takes them away."""
    by_name = {node.name: node for node in graph.nodes}
    for name in edit.dropped:
        alias = by_name[name]
        alias.replace_all_uses_with(alias.all_input_nodes[0])
        graph.erase_node(alias)
