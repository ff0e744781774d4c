"""What a traced model has as a whole: parameters and floating-point operations, at its full depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphshard.cost import node_flops
from graphshard.graph.ir import ParamRef
from graphshard.scale.blocks import block_starts
from graphshard.scale.resize import RankLayout, resized_param
from graphshard.scale.trace import Traced


@dataclass(frozen=True)
class Repetition:
    """Blocks of a model that were traced for more of them.

    Attributes:
        units: their units, ``"layers.0"`` and so on, in the model's order.
        layers: how many the model has.
    """

    units: tuple[str, ...]
    layers: int

    @property
    def extra(self) -> int:
        """Blocks that were not traced."""
        return self.layers - len(self.units)


@dataclass(frozen=True)
class ShardSizes:
    """Shards of one rank.

    Attributes:
        numel: elements of all of them.
        num_bytes: of all of them.
        block_bytes: of one block's.
    """

    numel: int
    num_bytes: int
    block_bytes: int


def shard_sizes(traced: Traced, repetition: Repetition, layout: RankLayout) -> ShardSizes:
    """What one rank holds on `layout`."""
    params = [resized_param(param, layout) for param in traced.params]
    block = [param for param in params if repetition.units and param.unit == repetition.units[0]]
    numel, num_bytes = _total(params)
    block_numel, block_bytes = _total(block)
    return ShardSizes(numel + repetition.extra * block_numel, num_bytes + repetition.extra * block_bytes, block_bytes)


def _total(params: Sequence[ParamRef]) -> tuple[int, int]:
    return sum(p.shard_numel for p in params), sum(p.shard_numel * p.dtype.itemsize for p in params)


def forward_flops(traced: Traced, repetition: Repetition) -> int:
    """Floating-point operations of matmuls and attention in one forward, on one rank; of causal attention half."""
    graph, params = traced.forward.gm.graph, traced.forward.params
    flops = [node_flops(node) for node in graph.nodes]
    total = sum(flops)
    if not repetition.extra:
        return total
    starts = [start for start, _ in block_starts(graph, params, repetition.units)]
    kept = (len(starts) - 1) // 2
    return total + repetition.extra * sum(flops[starts[kept] : starts[kept + 1]])
