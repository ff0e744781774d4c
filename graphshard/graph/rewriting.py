"""Changes to many arguments and results of a graph, in a time that grows with their number and not with its square."""

from __future__ import annotations

from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from graphshard.errors import VerifyError
from graphshard.graph.ir import output_node, val


class Placeholders:
    """The placeholders of a graph, and new ones behind them.

    Attributes:
        names: of all.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        nodes = [node for node in graph.nodes if node.op == "placeholder"]
        self.names = {node.name for node in nodes}
        self._last: Node = nodes[-1]

    def add(self, name: str, value: Tensor) -> Node:
        """A new one, behind the others; `value` is its fake value."""
        with self._graph.inserting_after(self._last):
            self._last = self._graph.placeholder(name)
        self._last.meta["val"] = value
        self.names.add(self._last.name)
        return self._last


def placeholders_first(graph: Graph) -> None:
    """Moves a graph's placeholders to its beginning: AOTAutograd puts the tokens of operators with effects (assertions,
    `torch.linalg.inv`'s) in front of them.
    """
    first = next(iter(graph.nodes))
    for node in [*graph.find_nodes(op="placeholder")] if first.op != "placeholder" else ():
        first.prepend(node)


class Replacements:
    """Puts nodes in the place of others everywhere, in the results of the graph at the end, all at once: to change one
    of n results takes a time of n.
    """

    def __init__(self, graph: Graph) -> None:
        self._output = output_node(graph)
        self._new: dict[Node, Node] = {}

    def put(self, old: Node, new: Node) -> None:
        """`new` is read in the place of `old`, which stays for now."""
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not self._output)
        self._new[old] = new

    def put_alike(self, old: Node, new: Node) -> None:
        """As `put`.

        Raises:
            VerifyError: G3, if their shapes, dtypes or strides differ: the nodes behind would be wrong, silently.
        """
        layouts = [(tuple(v.shape), v.dtype, v.stride()) for v in (val(old), val(new))]
        if layouts[0] != layouts[1]:
            raise VerifyError("G3", f"%{new.name} replaces %{old.name}: got {layouts[1]}, want {layouts[0]}")
        self.put(old, new)

    def finish(self) -> None:
        """Changes the results: nothing reads what has been replaced."""
        self._output.args = map_arg(self._output.args, self._latest)

    def _latest(self, node: Node) -> Node:
        while node in self._new:
            node = self._new[node]
        return node
