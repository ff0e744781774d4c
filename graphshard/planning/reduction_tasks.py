"""The reductions of a problem: when each gradient is there, and what its collectives and its copies take."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch.fx import Node

from graphshard.cost import CollectiveKind
from graphshard.graph.ir import PassContext, spec_of, val
from graphshard.graph.markers import padded_shape, reduce_ops
from graphshard.kernels import can_copy
from graphshard.planner import ReductionTask, Transfer
from graphshard.planning.communication_costs import CommunicationCosts
from graphshard.planning.planned_markers import PlannedMarkers
from graphshard.planning.program_memory import ProgramMemory


def reduction_tasks(
    place: Mapping[Node, int],
    markers: PlannedMarkers,
    ctx: PassContext,
    costs: CommunicationCosts,
    memory: ProgramMemory,
) -> list[ReductionTask]:
    """One for each gradient that is reduced, with places in the graph for positions."""

    def task(name: str, node: Node) -> ReductionTask:
        spec, grad = spec_of(node), node.args[0]
        assert isinstance(grad, Node)
        settings = ctx.flags.settings(markers.unit[node])
        size = padded_shape(spec.size, spec.world_size, spec.dim)
        wire_bytes = math.prod(size) * spec.reduce_dtype.itemsize
        shard_bytes = wire_bytes // spec.world_size
        ops = reduce_ops(spec.reduce_dtype, spec.world_size, spec.replicas, settings.divide_factor, settings.force_sum)
        scales = ops.premultiply is not None or ops.predivide is not None
        # Each makes a copy of its own: padding, shards in rank order, a cast, a scale.
        changes_in = sum(
            (
                size != tuple(spec.size),
                spec.dim > 0,
                val(grad).dtype != spec.reduce_dtype,
                scales,
            )
        )
        fused = ctx.fuses and can_copy(val(grad).dtype, spec.reduce_dtype, scales)
        in_bytes = val(grad).nbytes + wire_bytes
        changes_out = ops.postdivide is not None or val(node).dtype != spec.reduce_dtype
        copy_out_us = costs.copy_us(2 * shard_bytes) if changes_out else 0.0
        copied = spec.replicas > 1 and settings.all_reduce
        then: Transfer | None = costs.transfer("all_reduce", spec.replicate_group) if copied else None
        kind: CollectiveKind = "all_reduce" if spec.world_size == 1 else "reduce_scatter"
        group = settings.scatter_group or spec.group
        if spec.world_size == 1:
            assert then is not None, node
            transfer, then = then, None
        else:
            transfer = costs.transfer(kind, group)
        # What is left partial, or handed to a user's hook or collective, is one buffer.
        plain = spec.replicas == 1 and not settings.custom_reduce_scatter and not settings.all_reduce_hook
        return ReductionTask(
            fqn=name,
            unit=markers.unit[node],
            key=markers.key[node],
            transfer=transfer,
            then=then,
            wire_bytes=wire_bytes,
            grad_bytes=memory.grad_bytes(node),
            shard_bytes=shard_bytes,
            ready=place[grad] + 1,
            copy_in_us=costs.copy_us(in_bytes, fused),
            copy_out_us=copy_out_us,
            alone_in_us=costs.copy_us(in_bytes) if changes_in else 0.0,
            alone_out_us=copy_out_us,
            scratch_bytes=wire_bytes * min(1 if fused else 2, changes_in),
            coalesced_us=None if then else costs.coalesced_us(kind, group, plain),
        )

    return [task(name, node) for name, node in markers.reductions.items()]
