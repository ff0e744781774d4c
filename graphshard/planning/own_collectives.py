"""The model's own collectives: a plan leaves them where they are."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from graphshard.cost.traffic import num_bytes, tensors
from graphshard.graph.ir import fake, val, waits_of
from graphshard.graph.own_launches import own_launches
from graphshard.planner import OwnCollective
from graphshard.planning.communication_costs import CommunicationCosts


def own_collectives(place: Mapping[Node, int], costs: CommunicationCosts) -> list[OwnCollective]:
    """In graph order, with places in the graph for positions."""
    found = []
    for node, kind, group in own_launches(place):
        waits = [place[wait] for wait in waits_of(node)] or [place[node] + 1]
        sent, received = (list(tensors(value)) for value in (fake(node.all_input_nodes), val(node)))
        moved = max(sum(map(num_bytes, both)) for both in (sent, received))
        us = costs.collective_us(kind, moved, group)  # type: ignore[arg-type]
        found.append(OwnCollective(node.name, costs.stream(group), us, place[node], min(waits)))
    return found
