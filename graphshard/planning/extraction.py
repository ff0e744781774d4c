"""Reads a problem to plan off a marked graph: what is computed, gathered and reduced, and what it takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from graphshard.cost import CollectiveKind, CostModel, GroupShape
from graphshard.cost.traffic import tensors
from graphshard.graph.ir import (
    LAUNCHES,
    PARTIAL,
    PassContext,
    bucket_key,
    fake,
    is_call,
    is_marker,
    may_view,
    member_names,
    output_args,
    reductions,
    shard_placeholder,
    spec_of,
    unshards,
    val,
    waits_of,
)
from graphshard.graph.liveness import Allocation, allocations_of, bytes_of, held_by_caller, lifetimes, live_bytes
from graphshard.graph.markers import UNSHARD, padded_shape, reduce_ops
from graphshard.kernels import can_copy
from graphshard.planner import Gather, OwnCollective, Problem, Reduction, Transfer

# The model's own collectives that `LAUNCHES` does not name count as the ones that move as much.
_OWN_KINDS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}
# Ops are joined into one as long as they take less than this part of the program.
_GRAIN = 1 / 2000


@dataclass(frozen=True)
class Scene:
    """What sizes and times depend on besides the graph.

    Attributes:
        cost: times of everything.
        group_shape: of a process group, by its name.
        coalesces: whether a process group has a collective of a kind that takes several tensors, and may use it.
    """

    cost: CostModel
    group_shape: Callable[[str], GroupShape]
    coalesces: Callable[[str, CollectiveKind], bool] = lambda group, kind: False


def extract_problem(graph: Graph, ctx: PassContext, scene: Scene, cuts: frozenset[str] | None = None) -> Problem:
    """The problem of one marked graph. Its members are named as `member_names` names them.

    Args:
        graph: with markers; flags and residency have been applied.
        ctx: its parameters and flags.
        scene: machine and process groups.
        cuts: names of nodes that begin an op, beside those that must; None: ops are as long as their times allow.
    """
    return _Extraction(graph, ctx, scene, cuts).problem()


class _Extraction:
    def __init__(self, graph: Graph, ctx: PassContext, scene: Scene, cuts: frozenset[str] | None) -> None:
        self.cuts = cuts
        self.graph, self.ctx, self.scene, self.cost = graph, ctx, scene, scene.cost
        self.nodes = list(graph.nodes)
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self.allocations = allocations_of(graph)
        results = {result for result in output_args(graph) if isinstance(result, Node)}
        self.gathers = {
            name: node for name, node in member_names(unshards(graph), ctx).items() if spec_of(node).world_size > 1
        }
        self.reduced = {
            name: node
            for name, node in member_names(reductions(graph), ctx).items()
            if self._moves(node) and node in results and all(user.op == "output" for user in node.users)
        }
        self.streams: dict[str, int] = {}
        self.keys: dict[object, int] = {}
        self.wires: dict[int, set[torch.dtype]] = {}  # dtypes that share a bucket
        for node in self.gathers.values():
            self.wires.setdefault(self._key(node), set()).add(spec_of(node).dtype)
        self.last = self._last_reads()

    def problem(self) -> Problem:
        gathers = [self._gather(name, node) for name, node in self.gathers.items()]
        reduced = [self._reduction(name, node) for name, node in self.reduced.items()]
        own = self._own()
        position, ops, op_us, op_bytes = self._ops(gathers, reduced, own)
        gathers = [
            replace(
                gather,
                first_use=position[gather.first_use],
                last_use=position[gather.last_use],
                ready=position[gather.ready],
            )
            for gather in gathers
        ]
        reduced = [replace(reduction, ready=position[reduction.ready]) for reduction in reduced]
        for reduction in reduced:  # a gradient is there before its last view, from which on its reduction counts it
            begun = position[self._begun(self.reduced[reduction.fqn])]
            for i in range(begun, reduction.ready - 1):
                op_bytes[i] += reduction.grad_bytes
        return Problem(
            self.ctx.direction,
            tuple(ops),
            tuple(op_us),
            tuple(op_bytes),
            tuple(sorted(gathers, key=lambda gather: gather.first_use)),
            tuple(sorted(reduced, key=lambda reduction: reduction.ready)),
            tuple(replace(c, launch=position[c.launch], wait=position[c.wait]) for c in own),
            tuple(self.streams) or ("",),
            self.cost.contention,
        )

    # -- collectives

    def _moves(self, reduction: Node) -> bool:
        spec = spec_of(reduction)
        return spec.world_size > 1 or (spec.replicas > 1 and self.ctx.flags.settings(self._unit(reduction)).all_reduce)

    def _stream(self, group: str) -> int:
        return self.streams.setdefault(group, len(self.streams))

    def _transfer(self, kind: Any, group: str) -> Transfer:
        return Transfer(self._stream(group), self.cost.rates(kind, self.scene.group_shape(group)))

    def _unit(self, node: Node) -> str:
        return self.ctx.params[shard_placeholder(node).name].unit

    def _key(self, node: Node) -> int:
        return self.keys.setdefault(bucket_key(node, self.ctx), len(self.keys))

    def _gather(self, name: str, node: Node) -> Gather:
        """With places in the graph for positions."""
        spec, source = spec_of(node), node.args[0]
        assert isinstance(source, Node)
        full_bytes = math.prod(spec.size) * spec.dtype.itemsize
        wire_bytes = math.prod(padded_shape(spec.size, spec.world_size, spec.dim)) * spec.dtype.itemsize
        shard_bytes = wire_bytes // spec.world_size
        casts = val(source).dtype != spec.dtype or bool(spec.device)
        # Of a bucket of several dtypes, or from another device, copies are torch's.
        alike = len(self.wires[self._key(node)]) == 1
        fused = self.ctx.fuses and alike and not spec.device and can_copy(val(source).dtype, spec.dtype)
        plain = alike and not spec.device and not self.ctx.flags.settings(self._unit(node)).custom_all_gather
        in_bytes = val(source).nbytes + shard_bytes
        permutes = spec.dim > 0
        copy_out_us = self._copy_us(2 * full_bytes * (2 if permutes and not fused else 1), fused)
        uses = [self.place[user] for user in node.users if user.op != "output"]
        stays = any(user.op == "output" for user in self._readers(node))
        return Gather(
            fqn=name,
            unit=self._unit(node),
            key=self._key(node),
            transfer=self._transfer("all_gather", spec.group),
            wire_bytes=wire_bytes,
            full_bytes=wire_bytes,  # a slice of what is copied out, padding and all
            first_use=min(uses, default=len(self.nodes) - 1),
            last_use=len(self.nodes) if stays else self.last[node],
            ready=0 if source.op == "placeholder" else self.place[source] + 1,
            copy_in_us=self._copy_us(in_bytes, fused),
            copy_out_us=copy_out_us,
            alone_in_us=self._copy_us(in_bytes, False) if casts else 0.0,
            alone_out_us=self._copy_us(4 * full_bytes, False) if permutes else 0.0,
            alone_out_bytes=full_bytes if permutes else 0,
            shard_bytes=shard_bytes,
            scratch_bytes=shard_bytes if casts and not fused else 0,
            coalesced_us=self._coalesced_us("all_gather", spec.group, plain),
        )

    def _reduction(self, name: str, node: Node) -> Reduction:
        """Likewise."""
        spec, grad = spec_of(node), node.args[0]
        assert isinstance(grad, Node)
        settings = self.ctx.flags.settings(self._unit(node))
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
        fused = self.ctx.fuses and can_copy(val(grad).dtype, spec.reduce_dtype, scales)
        in_bytes = val(grad).nbytes + wire_bytes
        changes = ops.postdivide is not None or val(node).dtype != spec.reduce_dtype
        copy_out_us = self.cost.copy_us(2 * shard_bytes, 1) if changes else 0.0
        copied = spec.replicas > 1 and settings.all_reduce
        copies = self._transfer("all_reduce", spec.replicate_group) if copied else None
        kind: CollectiveKind = "all_reduce" if spec.world_size == 1 else "reduce_scatter"
        if spec.world_size == 1:
            assert copies is not None, node
            transfer, then = copies, None
        else:
            transfer, then = self._transfer(kind, settings.scatter_group or spec.group), copies
        # What is left partial, or handed to a user's hook or collective, is one buffer.
        plain = spec.replicas == 1 and not settings.custom_reduce_scatter and not settings.all_reduce_hook
        return Reduction(
            fqn=name,
            unit=self._unit(node),
            key=self._key(node),
            transfer=transfer,
            then=then,
            wire_bytes=wire_bytes,
            grad_bytes=self._own_bytes(grad, node),
            shard_bytes=shard_bytes,
            ready=self.place[grad] + 1,
            copy_in_us=self._copy_us(in_bytes, fused),
            copy_out_us=copy_out_us,
            alone_in_us=self._copy_us(in_bytes, False) if changes_in else 0.0,
            alone_out_us=copy_out_us,
            scratch_bytes=wire_bytes * min(1 if fused else 2, changes_in),
            coalesced_us=None if then else self._coalesced_us(kind, settings.scatter_group or spec.group, plain),
        )

    def _coalesced_us(self, kind: CollectiveKind, group: str, plain: bool) -> float | None:
        """What a tensor adds to a coalesced collective: counted as a kernel of its own, since none was measured."""
        return self.cost.hardware.kernel_us if plain and self.scene.coalesces(group, kind) else None

    def _copy_us(self, num_bytes: int, fused: bool) -> float:
        """Of one tensor's part of a bucket: a fused copy has one kernel for all of them, which is as good as none."""
        return self.cost.copy_us(num_bytes, 0 if fused else 1)

    def _own(self) -> list[OwnCollective]:
        """The model's own collectives, with places in the graph for positions."""
        found = []
        for node in self.nodes:
            kind = LAUNCHES.get(node.target) or _OWN_KINDS.get(getattr(node.target, "_opname", ""))
            waits = [self.place[wait] for wait in waits_of(node)]
            if node.op != "call_function" or kind is None or not waits:
                continue
            group = next((argument for argument in reversed(node.args) if isinstance(argument, str)), "")
            sent, received = (list(tensors(value)) for value in (fake(node.all_input_nodes), val(node)))
            num_bytes = max(sum(tensor.nbytes for tensor in both) for both in (sent, received))
            us = self.cost.collective_us(kind, num_bytes, self.scene.group_shape(group))  # type: ignore[arg-type]
            found.append(OwnCollective(node.name, self._stream(group), us, self.place[node], min(waits)))
        return found

    # -- memory

    def _readers(self, node: Node) -> list[Node]:
        """Everything that reads the memory of `node`, through views."""
        found, seen = [], [node]
        for value in seen:  # grows
            for user in value.users:
                if may_view(user) and user not in seen:
                    seen.append(user)
                found.append(user)
        return found

    def _last_reads(self) -> dict[Node, int]:
        """For each gathered parameter, the place of what reads it last."""
        gathered = [node for node in self.nodes if is_call(node, UNSHARD)]
        return {
            node: max((self.place[user] for user in self._readers(node)), default=self.place[node]) for node in gathered
        }

    def _own_bytes(self, grad: Node, marker: Node) -> int:
        """Bytes of a gradient that nothing but its marker reads; 0 where it is counted with the computation."""
        found = 0
        for allocation in self.allocations[grad]:
            readers = [reader for reader in self._readers(allocation.node) if not may_view(reader)]
            if allocation.node.op != "placeholder" and readers == [marker]:
                found += bytes_of(allocation)
        return found

    def _begun(self, marker: Node) -> int:
        """The place of what computes a gradient."""
        grad = marker.all_input_nodes[0]
        return min((self.place[allocation.node] for allocation in self.allocations[grad]), default=self.place[grad])

    def _spans(self) -> dict[Allocation, tuple[int, int]]:
        """Lifetimes in the computation: without gathered parameters and gradients that only a reduction reads."""
        planned = {*self.gathers.values(), *self.reduced.values()}
        grads = {
            allocation
            for node in self.reduced.values()
            for allocation in self.allocations[node.all_input_nodes[0]]
            if self._own_bytes(node.all_input_nodes[0], node)
        }
        held, partial = held_by_caller(self.ctx), {PARTIAL + name for name in self.ctx.flags.partial}
        # Nothing reads a partial gradient yet: the collective that adds it may be awaited last.
        spans = lifetimes(self.graph, lambda node: held(node) or node.name in partial)
        return {
            allocation: span
            for allocation, span in spans.items()
            if allocation.node not in planned and allocation not in grads
        }

    # -- positions

    def _ops(
        self,
        gathers: Sequence[Gather],
        reduced: Sequence[Reduction],
        own: Sequence[OwnCollective],
    ) -> tuple[list[int], list[str], list[float], list[int]]:
        """Joins nodes into ops.

        Returns:
            The position of each place in the graph, names, times and bytes of the ops.
        """
        count = len(self.nodes)
        times = [self._us(node) for node in self.nodes]
        live_at = live_bytes(self._spans(), count)
        begins = {place for g in gathers for place in (g.first_use, g.ready, g.last_use + 1)}
        begins |= {reduction.ready for reduction in reduced} | {place for c in own for place in (c.launch, c.wait)}
        grain = sum(times) * _GRAIN
        position = [0] * (count + 2)
        ops: list[str] = []
        op_us: list[float] = []
        op_bytes: list[int] = []
        must = True
        for place, node in enumerate(self.nodes):
            live = live_at[place]
            must = must or place in begins
            position[place] = len(ops) if must or not ops else len(ops) - 1
            if not self._is_anchor(node):
                if op_bytes:
                    op_bytes[-1] = max(op_bytes[-1], live)
                continue
            if not must and ops:
                must = op_us[-1] + times[place] > grain if self.cuts is None else node.name in self.cuts
            if must or not ops:
                ops.append(node.name)
                op_us.append(0.0)
                op_bytes.append(live)
                must = False
            position[place] = len(ops) - 1
            op_us[-1] += times[place]
            op_bytes[-1] = max(op_bytes[-1], live)
        position[count:] = [len(ops)] * 2
        return position, ops, op_us, op_bytes

    def _us(self, node: Node) -> float:
        if is_call(node, UNSHARD) and node not in self.gathers.values():
            return self.cost.copy_us(val(node).nbytes * 2, 1) if val(node).dtype != val(node.args[0]).dtype else 0.0
        return self.cost.compute_us(node)

    def _is_anchor(self, node: Node) -> bool:
        """Whether a plan can say: before this node. Markers go, arguments and results stay where they are."""
        return node.op not in ("placeholder", "output") and not is_marker(node)
