"""The cost model, asked once for a traced graph."""

from __future__ import annotations

from torch.fx import Graph, Node

from bench.schedule.deep_graph import COPY_OF
from graphshard.cost import CostModel, Hardware


class KnownCosts(CostModel):
    """Times of a graph's nodes as they were traced, whatever their order is and however often they are copied.

    Args:
        hardware: that the program runs on.
        graph: as it was traced.
    """

    def __init__(self, hardware: Hardware, graph: Graph) -> None:
        super().__init__(hardware)
        self._known = {node.name: us for node, us in super().graph_us(graph).items()}

    def graph_us(self, graph: Graph) -> dict[Node, float]:
        """Microseconds of each node of a graph; of one that was not traced, as it stands there."""
        found = super().graph_us(graph)
        return {node: self._known.get(node.meta.get(COPY_OF, node.name), us) for node, us in found.items()}
