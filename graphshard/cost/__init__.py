"""Costs: how long operators, copies and collectives take on a machine. Planner and simulator know no other numbers.

Reads nodes, as they follow one another; changes none. Imports `compat`.
"""

from __future__ import annotations

from graphshard.cost.collectives import collective_alpha_beta, collective_us
from graphshard.cost.compute import alone_us, graph_us, node_flops
from graphshard.cost.hardware import HARDWARE, find_hardware
from graphshard.cost.model import CostModel
from graphshard.cost.rates import CollectiveKind, Hardware, Protocol
from graphshard.cost.topology import GroupShape, group_shape

__all__ = [
    "HARDWARE",
    "CollectiveKind",
    "CostModel",
    "GroupShape",
    "Hardware",
    "Protocol",
    "alone_us",
    "collective_alpha_beta",
    "collective_us",
    "find_hardware",
    "graph_us",
    "group_shape",
    "node_flops",
]
