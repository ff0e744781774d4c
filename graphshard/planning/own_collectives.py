"""The model's own collectives, such as those of tensor parallelism: a plan leaves them where they are."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from graphshard.cost.traffic import num_bytes, tensors
from graphshard.graph.ir import LAUNCHES, fake, val, waits_of
from graphshard.planner import OwnCollective
from graphshard.planning.communication_costs import CommunicationCosts

# Those that `LAUNCHES` does not name count as the ones that move as much.
_KINDS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}


def own_collectives(place: Mapping[Node, int], costs: CommunicationCosts) -> list[OwnCollective]:
    """In graph order, with places in the graph for positions."""
    found = []
    for node in place:
        kind = LAUNCHES.get(node.target) or _KINDS.get(getattr(node.target, "_opname", ""))
        if node.op != "call_function" or kind is None or not (waits := [place[wait] for wait in waits_of(node)]):
            continue
        group = next((argument for argument in reversed(node.args) if isinstance(argument, str)), "")
        sent, received = (list(tensors(value)) for value in (fake(node.all_input_nodes), val(node)))
        moved = max(sum(map(num_bytes, both)) for both in (sent, received))
        us = costs.collective_us(kind, moved, group)  # type: ignore[arg-type]
        found.append(OwnCollective(node.name, costs.stream(group), us, place[node], min(waits)))
    return found
