"""The gathers of a problem: when each parameter is needed, and what its all-gather and its copies take."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.fx import Node

from graphshard.graph.ir import PassContext, gathered_source, spec_of, val
from graphshard.graph.markers import padded_shape
from graphshard.kernels import can_copy
from graphshard.planner import GatherTask
from graphshard.planning.communication_costs import CommunicationCosts
from graphshard.planning.planned_markers import PlannedMarkers
from graphshard.planning.program_memory import ProgramMemory


def gather_tasks(
    place: Mapping[Node, int],
    markers: PlannedMarkers,
    ctx: PassContext,
    costs: CommunicationCosts,
    memory: ProgramMemory,
) -> list[GatherTask]:
    """One for each parameter that is gathered, with places in the graph for positions."""
    dtypes: dict[int, set[torch.dtype]] = {}  # that share a bucket
    for node in markers.gathers.values():
        dtypes.setdefault(markers.key[node], set()).add(spec_of(node).dtype)

    def task(name: str, node: Node) -> GatherTask:
        spec, source = spec_of(node), gathered_source(node)
        full_bytes = math.prod(spec.size) * spec.dtype.itemsize
        wire_bytes = math.prod(padded_shape(spec.size, spec.world_size, spec.dim)) * spec.dtype.itemsize
        shard_bytes = wire_bytes // spec.world_size
        casts = val(source).dtype != spec.dtype or bool(spec.device)
        # Of a bucket of several dtypes, or from another device, copies are torch's.
        alike = len(dtypes[markers.key[node]]) == 1 and not spec.device
        fused = ctx.fuses and alike and can_copy(val(source).dtype, spec.dtype)
        plain = alike and not ctx.flags.settings(markers.unit[node]).custom_all_gather
        in_bytes = val(source).nbytes + shard_bytes
        permutes = spec.dim > 0
        uses = [place[user] for user in node.users if user.op != "output"]
        return GatherTask(
            fqn=name,
            unit=markers.unit[node],
            key=markers.key[node],
            transfer=costs.transfer("all_gather", spec.group),
            wire_bytes=wire_bytes,
            full_bytes=wire_bytes,  # a slice of what is copied out, padding and all
            first_use=min(uses, default=len(place) - 1),
            last_use=memory.last_read(node),
            ready=0 if source.op == "placeholder" else place[source] + 1,
            copy_in_us=costs.copy_us(in_bytes, fused),
            copy_out_us=costs.copy_us(2 * full_bytes * (2 if permutes and not fused else 1), fused),
            alone_in_us=costs.copy_us(in_bytes) if casts else 0.0,
            alone_out_us=costs.copy_us(4 * full_bytes) if permutes else 0.0,
            alone_out_bytes=full_bytes if permutes else 0,
            shard_bytes=shard_bytes,
            scratch_bytes=shard_bytes if casts and not fused else 0,
            coalesced_us=costs.coalesced_us("all_gather", spec.group, plain),
        )

    return [task(name, node) for name, node in markers.gathers.items()]
