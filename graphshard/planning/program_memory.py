"""How long each value of a marked graph is live, and what the computation allocates: live ranges over its nodes."""

from __future__ import annotations

import operator

from torch.fx import Graph, Node

from graphshard.graph.ir import PARTIAL, PassContext, may_view
from graphshard.graph.liveness import Allocation, allocations_of, bytes_of, held_by_caller, live_bytes, live_ranges
from graphshard.planning.planned_markers import PlannedMarkers


class ProgramMemory:
    """Live ranges of one program, in places: a place is the index of a node.

    Args:
        graph: with markers.
        ctx: its parameters and flags.
        markers: of its problem: the planner counts what they allocate.
    """

    def __init__(self, graph: Graph, ctx: PassContext, markers: PlannedMarkers) -> None:
        self._graph, self._ctx, self._markers = graph, ctx, markers
        self._place = {node: i for i, node in enumerate(graph.nodes)}
        self._allocations = allocations_of(graph)

    def last_read(self, gathered: Node) -> int:
        """The place of what reads a gathered parameter last; the number of nodes: it leaves the program."""
        readers = self._readers(Allocation(gathered, None))
        if any(reader.op == "output" for reader in readers):
            return len(self._place)
        return max((self._place[reader] for reader in readers), default=self._place[gathered])

    def grad_bytes(self, marker: Node) -> int:
        """Bytes of a gradient that nothing but its marker reads; 0 where it is counted with the computation."""
        found = 0
        for allocation in self._allocations[_grad(marker)]:
            readers = [reader for reader in self._readers(allocation) if not may_view(reader)]
            if allocation.node.op != "placeholder" and readers == [marker]:
                found += bytes_of(allocation)
        return found

    def grad_begin(self, marker: Node) -> int:
        """The place of what computes a gradient."""
        grad = _grad(marker)
        return min((self._place[allocation.node] for allocation in self._allocations[grad]), default=self._place[grad])

    def computation_bytes(self) -> list[int]:
        """What the computation allocates at each place."""
        return live_bytes(self._live_ranges(), len(self._place))

    def _live_ranges(self) -> dict[Allocation, tuple[int, int]]:
        """Without gathered parameters and gradients that only a reduction reads."""
        gathers, reductions = self._markers.gathers.values(), self._markers.reductions.values()
        planned = {*gathers, *reductions}
        grads = {
            allocation
            for marker in reductions
            for allocation in self._allocations[_grad(marker)]
            if self.grad_bytes(marker)
        }
        held, partial = held_by_caller(self._ctx), {PARTIAL + name for name in self._ctx.flags.partial}
        # Nothing reads a partial gradient yet: the collective that adds it may be awaited last.
        found = live_ranges(self._graph, lambda node: held(node) or node.name in partial, self._allocations)
        return {
            allocation: live_range
            for allocation, live_range in found.items()
            if allocation.node not in planned and allocation not in grads
        }

    def _readers(self, allocation: Allocation) -> list[Node]:
        """Everything that reads an allocation, through views."""
        found, seen = list[Node](), [allocation.node]
        if allocation.place is not None:  # other results of its node have readers of their own
            takes = [user for user in allocation.node.users if user.target is operator.getitem]
            seen = [user for user in takes if user.args[1] == allocation.place]
            found = [user for user in allocation.node.users if user not in takes]
        for value in seen:  # grows
            for user in value.users:
                if may_view(user) and user not in seen:
                    seen.append(user)
                found.append(user)
        return found


def _grad(marker: Node) -> Node:
    return marker.all_input_nodes[0]
