"""The marked graph of a deep model from that of a shallow one, node by node: for what needs a graph, not numbers.

A model is traced with a few blocks. In the middle one block follows another as it would in a deeper model; that block's
nodes are repeated. `graphshard.scale.repeat` does the same with the numbers of a problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from graphshard.compat.inductor import copy_graph
from graphshard.graph.ir import ParamRef, output_node, reductions, shard_placeholder, unshards
from graphshard.scale.repeat import TRACED_BLOCKS, NotRepeated
from graphshard.scale.trace import TracedProgram

# In the meta of a copied node: name of the node that was traced.
COPY_OF = "copy_of"


def deepened(program: TracedProgram, units: Sequence[str], layers: int) -> TracedProgram:
    """`program`, whose blocks are `units`, as if there were `layers` of them.

    Args:
        program: forward or backward of a model.
        units: names of the units of its blocks, ``"layers.0"`` and so on.
        layers: number of blocks wanted, at least as many as there are.

    Raises:
        NotRepeated: two neighbouring blocks differ.
    """
    if layers == len(units):
        return program
    graph = copy_graph(program.gm)
    settle_markers(graph)
    deepening = _Deepening(graph, program, units, layers)
    deepening.copy()
    graph.lint()
    gm = GraphModule(program.gm, graph)
    return replace(program, gm=gm, params=deepening.params)


def settle_markers(graph: Graph) -> None:
    """Puts each unshard in front of what uses it first, each reduction behind its gradient."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    for marker in unshards(graph):
        first = min(marker.users, key=lambda user: place[user])
        if first.op != "output":
            first.prepend(marker)
    for marker in reductions(graph):
        max(marker.all_input_nodes, key=lambda source: place[source]).append(marker)


class _Deepening:
    def __init__(self, graph: Graph, program: TracedProgram, units: Sequence[str], layers: int) -> None:
        self.graph, self.program, self.extra = graph, program, layers - len(units)
        body = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        place = {node: i for i, node in enumerate(body)}
        starts: dict[str, int] = {}
        for marker in unshards(graph):
            unit = program.params[shard_placeholder(marker).name].unit
            starts[unit] = min(starts.get(unit, place[marker]), place[marker])
        self.order = sorted((unit for unit in units if unit in starts), key=starts.__getitem__)
        if len(self.order) < TRACED_BLOCKS:
            raise NotRepeated(f"want at least {TRACED_BLOCKS} blocks that the program gathers, got {len(self.order)}")
        self.kept = (len(self.order) - 1) // 2
        first, second, third = (starts[self.order[self.kept + i]] for i in range(3))
        self.block, self.rest = body[first:second], body[second:]
        self.next = self._successors(body[second:third])
        earlier = set(body[:first])
        arguments = chain.from_iterable(node.all_input_nodes for node in self.block)
        self.own = dict.fromkeys(
            [
                *self.block,
                *(
                    node
                    for node in arguments
                    if node.op == "placeholder" and self.next[node] is not node and not earlier & set(node.users)
                ),
            ]
        )
        self.made: dict[tuple[Node, int], Node] = {}
        backwards = self.order[0] != units[0]
        prefix = units[0].rpartition(".")[0]
        self.names = [f"{prefix}.{layers - 1 - i if backwards else i}" for i in range(layers)]
        # The first block that has a copy may be the next one's for a shard that is read in two.
        own = {node.name for node in self.own}
        self.params = {
            name: self._renamed(param, self.extra if self._place(param) > self.kept and name not in own else 0)
            for name, param in program.params.items()
        }

    def _place(self, param: ParamRef) -> int:
        return self.order.index(param.unit) if param.unit in self.order else -1

    def _renamed(self, param: ParamRef, by: int) -> ParamRef:
        if param.unit not in self.order:
            return param
        unit = self.names[self._place(param) + by]
        return replace(param, unit=unit, fqn=unit + param.fqn.removeprefix(param.unit))

    def _successors(self, following: Sequence[Node]) -> dict[Node, Node]:
        """What the next block has in the place of each node that the block has or reads; itself: all blocks read it."""
        if len(self.block) != len(following):
            raise NotRepeated(f"blocks have {len(self.block)} and {len(following)} nodes")
        found: dict[Node, Node] = {}
        for node, successor in zip(self.block, following, strict=True):
            pairs = [(node, successor), *zip(node.all_input_nodes, successor.all_input_nodes, strict=False)]
            if _shape(node) != _shape(successor) or any(found.setdefault(a, b) is not b for a, b in pairs):
                raise NotRepeated(f"%{node.name} and %{successor.name} differ")
        return found

    def _read_by(self, copy: int, node: Node) -> Node:
        """What the block's copy reads in the place of `node`; copy 0 is the block itself."""
        if copy == 0 or self.next[node] is node:
            return node
        if node in self.own:
            return self.made[node, copy]
        successor = self.next[node]
        if successor not in self.own:
            raise NotRepeated(f"%{node.name}: the block that reads it is not the one behind it")
        return successor if copy == 1 else self.made[successor, copy - 1]

    def copy(self) -> None:
        """Adds the copies, and makes what follows the block read the last of them."""
        results = list(output_node(self.graph).args[0])  # type: ignore[arg-type]
        last = [node for node in self.graph.nodes if node.op == "placeholder"][-1]
        anchor = self.rest[0]
        for copy in range(1, self.extra + 1):
            for node in sorted(self.own, key=lambda node: node.op != "placeholder"):
                is_placeholder = node.op == "placeholder"
                with self.graph.inserting_after(last) if is_placeholder else self.graph.inserting_before(anchor):
                    made = self.graph.create_node(
                        node.op,
                        node.target,
                        map_arg(node.args, lambda source, copy=copy: self._read_by(copy, source)),
                        map_arg(node.kwargs, lambda source, copy=copy: self._read_by(copy, source)),
                        f"{node.name}_copy{copy}",
                    )
                made.meta = {**node.meta, COPY_OF: node.name}
                self.made[node, copy] = made
                if is_placeholder:
                    made.target = made.name
                    if node.name in self.program.params:
                        self.params[made.name] = self._renamed(self.program.params[node.name], copy)
                results += [made] * results.count(node)
        output_node(self.graph).args = (tuple(results),)
        for node in self.rest:
            for source in node.all_input_nodes:
                if source in self.own:
                    node.replace_input_with(source, self.made[source, self.extra])


def _shape(node: Node) -> Any:
    """What two nodes of one role have in common: all but which nodes they read."""
    value = node.meta.get("val")
    inputs = len(node.all_input_nodes)
    return node.target, repr(map_arg((node.args, node.kwargs), lambda _: None)), inputs, getattr(value, "shape", None)
