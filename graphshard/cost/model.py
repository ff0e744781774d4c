"""What planner and simulator ask for the time of anything."""

from __future__ import annotations

import hashlib
import json

from torch.fx import Graph, Node

from graphshard.cost.collectives import collective_alpha_beta, collective_rates, collective_us
from graphshard.cost.compute import alone_us, graph_us
from graphshard.cost.hardware_file import hardware_fields
from graphshard.cost.rates import CollectiveKind, Hardware
from graphshard.cost.topology import GroupShape

# To be raised with every change of a formula: plans made with another version are not comparable.
FORMULAS = 1


class CostModel:
    """Times on one machine: a pure function of graph, group and hardware, equal on every rank.

    Args:
        hardware: that the program runs on.
        fused: whether Inductor compiles the graph; else each operator is a kernel of its own.
    """

    def __init__(self, hardware: Hardware, fused: bool = True) -> None:
        self.hardware = hardware
        self.fused = fused
        numbers = hardware_fields(hardware)
        del numbers["sources"], numbers["name"]
        shaping = json.dumps([FORMULAS, fused, numbers], sort_keys=True, allow_nan=False)
        self._fingerprint = hashlib.sha256(shaping.encode()).hexdigest()[:16]

    @property
    def contention(self) -> float:
        """Compute runs at 1 / (1 + contention) of its rate while a collective is under way."""
        return self.hardware.contention

    @property
    def fingerprint(self) -> str:
        """A short hash of all that shapes these numbers."""
        return self._fingerprint

    def graph_us(self, graph: Graph) -> dict[Node, float]:
        """Microseconds of each node of a graph of aten operators."""
        return graph_us(self.hardware, graph, fused=self.fused)

    def alone_us(self, node: Node) -> float:
        """Microseconds of one aten node that shares its kernel with no other."""
        return alone_us(self.hardware, node)

    def copy_us(self, num_bytes: int, kernels: int = 1) -> float:
        """Microseconds of casts, copy-ins and copy-outs.

        Args:
            num_bytes: read plus written.
            kernels: that it takes.

        Raises:
            ValueError: if either is negative.
        """
        if num_bytes < 0 or kernels < 0:
            raise ValueError(f"copy_us: got {num_bytes} bytes in {kernels} kernels, want at least 0 of both")
        return max(num_bytes / (self.hardware.memory_gb_s * 1e3), kernels * self.hardware.kernel_us)

    def collective_us(self, kind: CollectiveKind, num_bytes: int, group: GroupShape) -> float:
        """Microseconds of one collective; `num_bytes` is the size of the full tensor."""
        return collective_us(self.hardware, kind, num_bytes, group)

    def rates(self, kind: CollectiveKind, group: GroupShape) -> tuple[tuple[float, float], ...]:
        """(Latency in microseconds, microseconds per byte) of each way to run a collective: the least counts."""
        return collective_rates(self.hardware, kind, group)

    def alpha_us(self, kind: CollectiveKind, group: GroupShape) -> float:
        """The least latency of a collective, whatever its size: for lower bounds."""
        return collective_alpha_beta(self.hardware, kind, group)[0]

    def us_per_byte(self, kind: CollectiveKind, group: GroupShape) -> float:
        """The least microseconds per byte of the full tensor: for lower bounds."""
        return collective_alpha_beta(self.hardware, kind, group)[1]
