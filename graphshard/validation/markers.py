"""What markers mean, over the tensors of all ranks: the reference that passes are checked against.

Written from what eager FSDP2 does, not from what the passes emit: each parameter by itself, one collective each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Node

from graphshard.fsdp2.settings import DEFAULT_SETTINGS, UnitSettings
from graphshard.graph.ir import PARTIAL, PassContext, is_call, may_view, spec_of
from graphshard.graph.markers import ShardSpec, padded_shape, reduce_ops
from graphshard.validation.collectives import summed
from graphshard.validation.world import World

Values = list[Tensor]


def gathered(shards: Sequence[Tensor], spec: ShardSpec, world: World) -> Values:
    """The full parameter of each rank, shared by ranks that gather the same shards."""
    local = _each(shards, lambda shard: shard.to(spec.device or shard.device, spec.dtype))
    known: dict[object, Tensor] = {}
    found = []
    for rank, own in enumerate(local):
        ranks = world.members(spec.group, rank) if spec.world_size > 1 else (rank,)
        parts = [local[other] for other in ranks]
        key = tuple(map(id, parts)) if spec.world_size > 1 else id(own)
        if key not in known:
            known[key] = joined(parts, spec)
        found.append(known[key])
    return found


def joined(parts: Sequence[Tensor], spec: ShardSpec) -> Tensor:
    """The parameter of its flat, padded shards."""
    padded = padded_shape(spec.size, spec.world_size, spec.dim)
    part = [*padded[: spec.dim], padded[spec.dim] // spec.world_size, *padded[spec.dim + 1 :]]
    whole = torch.cat([shard.reshape(part) for shard in parts], spec.dim)
    return whole.narrow(spec.dim, 0, spec.size[spec.dim]).clone(memory_format=torch.contiguous_format)


def parted(full: Tensor, spec: ShardSpec) -> list[Tensor]:
    """The flat, padded shards of a parameter."""
    padded = full.new_zeros(padded_shape(spec.size, spec.world_size, spec.dim))
    padded.narrow(spec.dim, 0, spec.size[spec.dim]).copy_(full)
    if not padded.numel():
        return [padded.reshape(-1)] * spec.world_size
    return [part.reshape(-1) for part in padded.chunk(spec.world_size, spec.dim)]


@dataclass
class Reductions:
    """How gradients are reduced.

    Attributes:
        ctx: of the passes.
        world: of ranks.
        inputs: of the graph, by the name of the placeholder.
        asked: whether what the flags ask of gradients is still to come, and is done here.
        held: by shard, what earlier backwards left unreduced, in the order in which it is added.
    """

    ctx: PassContext
    world: World
    inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    asked: bool = False
    held: dict[str, list[list[Tensor]]] = field(default_factory=dict)

    def reduced(self, node: Node, grads: list[Tensor], shards: list[Tensor]) -> Values:
        """What a reduction yields."""
        spec, name = spec_of(node), shard_name(node)
        param = self.ctx.params.get(name)
        settings = DEFAULT_SETTINGS if param is None else self.ctx.flags.settings(param.unit)
        is_partial = "partial" in node.meta
        if self.asked:
            for held in self.held.get(name, ()):
                cast = param is not None and param.adds_in_reduce_dtype and held[0].dtype == spec.reduce_dtype
                grads = [old + (new.to(old.dtype) if cast else new) for old, new in zip(held, grads, strict=True)]
            if name in self.ctx.flags.unreduced:
                return grads
            is_partial = is_partial or (spec.replicas > 1 and not settings.all_reduce)
        return self._over_ranks(spec, settings, is_partial, grads, shards, self.inputs.get(PARTIAL + name))

    def _over_ranks(
        self,
        spec: ShardSpec,
        settings: UnitSettings,
        is_partial: bool,
        grads: list[Tensor],
        shards: list[Tensor],
        earlier: list[Tensor] | None,
    ) -> Values:
        ops = reduce_ops(spec.reduce_dtype, spec.world_size, spec.replicas, settings.divide_factor, settings.force_sum)

        def scaled(grad: Tensor) -> Tensor:
            grad = grad.to(spec.reduce_dtype)
            if ops.premultiply is not None:
                return grad * ops.premultiply
            return grad if ops.predivide is None else grad / ops.predivide

        values = _each(grads, scaled)
        if spec.world_size > 1:
            parts = [parted(value, spec) for value in values]
            values = self._per_group(spec.group, parts, ops.scatter)
        else:
            values = [value.reshape(-1) for value in values]
        if earlier is not None and spec.replicas > 1:
            values = [value + old for value, old in zip(values, earlier, strict=True)]
        if is_partial:
            return values
        if spec.replicas > 1:
            values = [
                summed([values[other] for other in self.world.members(spec.replicate_group, rank)], ops.reduce)
                for rank in range(self.world.size)
            ]
        divided = values if ops.postdivide is None else [value / ops.postdivide for value in values]
        return [value.to(shard.device, shard.dtype) for value, shard in zip(divided, shards, strict=True)]

    def _per_group(self, group: str, parts: list[list[Tensor]], op: str) -> Values:
        found = []
        for rank in range(self.world.size):
            ranks = self.world.members(group, rank)
            found.append(summed([parts[other][ranks.index(rank)] for other in ranks], op))
        return found


def shard_name(marker: Node) -> str:
    """Name of what a marker's shard is a view of."""
    node = (
        marker.args[0]
        if len(marker.args) < 3 or not is_call(marker, torch.ops.graphshard.reduce_grad.default)
        else marker.args[1]
    )
    while isinstance(node, Node) and may_view(node):
        node = node.args[0]
    return node.name if isinstance(node, Node) else ""


def post_forward_shard(full: Tensor, spec: ShardSpec, count: int, place: int) -> Tensor:
    """The shard that a rank keeps of a gathered parameter behind forward, over a smaller group."""
    size = ShardSpec(spec.size, spec.dtype, spec.reduce_dtype, spec.dim, count, "")
    shard = parted(full, size)[place]
    assert shard.numel() == math.prod(padded_shape(spec.size, count, spec.dim)) // count
    return shard


def _each(values: Sequence[Tensor], change: Callable[[Tensor], Tensor]) -> Values:
    """`change` of each, once for those that are one tensor."""
    known: dict[int, Tensor] = {}
    return [known[id(value)] if id(value) in known else known.setdefault(id(value), change(value)) for value in values]
