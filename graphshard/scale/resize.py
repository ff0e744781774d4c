"""A traced program for any number of ranks: shards and process groups are all that depends on it.

Markers say how their parameter is sharded; a marked graph for another mesh is the same graph with other shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch.fx import Graph

from graphshard.compat.inductor import copy_graph
from graphshard.cost import GroupShape
from graphshard.cost.topology import group_shape
from graphshard.graph.ir import (
    Flags,
    ParamRef,
    PassContext,
    fake_empty,
    is_call,
    is_marker,
    shard_placeholder,
    spec_of,
    unshards,
    val,
)
from graphshard.graph.markers import REDUCE_GRAD, padded_shape
from graphshard.passes import PROGRAM
from graphshard.scale.trace import TracedProgram

SHARDS, COPIES = "shards", "copies"


@dataclass(frozen=True)
class RankLayout:
    """How ranks are used. Global ranks fill the tensor-parallel axis first, then the shards, then their copies.

    Attributes:
        shards: ranks that parameters are sharded over.
        copies: of each shard (hybrid sharding).
        tensor: ranks of the tensor-parallel axis.
    """

    shards: int
    copies: int = 1
    tensor: int = 1

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.shards * self.copies * self.tensor

    @property
    def batches(self) -> int:
        """Ranks, or tensor-parallel groups of them, that compute a batch of their own."""
        return self.shards * self.copies

    def group_shapes(self, ranks_per_node: int, tensor_group: str = "") -> Callable[[str], GroupShape]:
        """Where the ranks of each process group are, by its name."""
        inside = self.tensor * self.shards
        shapes = {
            SHARDS: group_shape(range(0, inside, self.tensor), ranks_per_node),
            COPIES: group_shape(range(0, inside * self.copies, inside), ranks_per_node),
            tensor_group: group_shape(range(self.tensor), ranks_per_node),
        }
        return lambda name: shapes[name]

    def __str__(self) -> str:
        parts = [f"{self.copies} x {self.shards}" if self.copies > 1 else f"{self.shards}"]
        return " ".join(parts + ([f"x tp {self.tensor}"] if self.tensor > 1 else []))


def resized_param(param: ParamRef, layout: RankLayout) -> ParamRef:
    """The same parameter on `layout`."""
    return replace(param, shard_numel=_shard_numel(param.size, layout.shards, param.dim))


def _shard_numel(size: tuple[int, ...], shards: int, dim: int) -> int:
    return math.prod(padded_shape(size, shards, dim)) // shards


def program_on(program: TracedProgram, layout: RankLayout, stays: bool = True) -> tuple[Graph, PassContext]:
    """The graph that a planner sees on `layout`, and what it may know of it: flags and residency have been applied.

    One rank counts as two that are one: its parameters are cast and copied as on more, and take no time on the wire.

    Args:
        program: as traced.
        layout: of the ranks.
        stays: whether what FSDP2 leaves gathered behind forward stays; else everything is gathered again.
    """
    graph = copy_graph(program.gm)
    shards = max(2, layout.shards)
    for node in graph.nodes:
        if not is_marker(node):
            continue
        spec = replace(spec_of(node), world_size=shards, group=SHARDS)
        if layout.copies > 1:
            spec = replace(spec, replicas=layout.copies, replicate_group=COPIES)
        node.args = (*node.args[:-1], str(spec))
        placeholder = shard_placeholder(node)
        numel = _shard_numel(spec.size, layout.shards, spec.dim)
        if val(placeholder).numel() != numel:
            placeholder.meta["val"] = fake_empty(val(placeholder), [numel], val(placeholder).dtype)
        if is_call(node, REDUCE_GRAD):
            node.meta["val"] = val(placeholder)
    params = {name: resized_param(param, layout) for name, param in program.params.items()}
    gathered = {shard_placeholder(node).name for node in unshards(graph)}
    staying = tuple(name for name in program.params if stays and name in program.stays & gathered)
    flags = Flags(kept=staying) if program.direction == "forward" else Flags(resident=staying)
    ctx = PassContext(program.direction, params, flags)
    for step in PROGRAM:
        if step.name == "assign_buckets":
            break
        if edit := step.decide(graph, ctx):
            step.apply(graph, edit)
    return graph, ctx
