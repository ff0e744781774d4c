"""Turns markers into collectives: cast, flat copy-in, launch, wait, copy-out.

Needs: a graph with markers; those with one ``meta["bucket"]`` share a collective, any other gets its own, and where
``meta["coalesced"]`` says so, there is no flat buffer. Leaves: no marker, and ``meta["steps"]`` of the plan, if there
is one, on what is inserted. A gather stands where the first of its parameters is used, a reduction where the last of
its gradients is ready.

    %a = unshard(%s0)            %in = cat([%s0, %s1])                    # copy-in
    %b = unshard(%s1)     ->     %ag = all_gather_into_tensor(%in)        # launch
                                 %w = wait_tensor(%ag)
                                 %a = reshape(split(view(%w, [W, -1]), 0))  # copy-out

Shards are padded per parameter, so that every rank's part is equal. Launches are out of place: with ``_out`` variants
Inductor reuses the input before the wait. With one rank a gather is a cast or a view and a reduction a cast; over
copies of shards an all-reduce follows.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch.fx import Graph, Node

from graphshard.fsdp2.settings import UnitSettings
from graphshard.graph.builder import Builder
from graphshard.graph.emit_gather import emit_gather
from graphshard.graph.emit_reduction import emit_reduction
from graphshard.graph.ir import PARTIAL, PassContext, is_call, shard_placeholder
from graphshard.graph.markers import REDUCE_GRAD, UNSHARD
from graphshard.graph.rewriting import Replacements


@dataclass(frozen=True)
class Insertion:
    """One collective to insert.

    Attributes:
        bucket: its name.
        unit: its unit.
        markers: in bucket order.
        fqns: of their parameters.
        anchor: the marker that it is placed at.
        settings: of the unit.
        partials: of each marker, the placeholder of an earlier partial gradient, ``""`` for none.
        steps: (place in the plan, step, the node before which it happens), if there is a plan.
        coalesced: whether there is no flat buffer.
    """

    bucket: str
    unit: str
    markers: tuple[str, ...]
    fqns: tuple[str, ...]
    anchor: str
    settings: UnitSettings
    partials: tuple[str, ...]
    steps: tuple[tuple[int, str, str], ...] = ()
    coalesced: bool = False


@dataclass(frozen=True)
class CollectivesEdit:
    """Every collective to insert."""

    insertions: tuple[Insertion, ...]

    def __bool__(self) -> bool:
        return bool(self.insertions)


def decide(graph: Graph, ctx: PassContext) -> CollectivesEdit:
    """Collects the buckets in graph order."""
    buckets: dict[str, list[Node]] = defaultdict(list)
    placeholders = {node.name for node in graph.nodes if node.op == "placeholder"}
    for node in graph.nodes:
        if is_call(node, UNSHARD) or is_call(node, REDUCE_GRAD):
            name, _ = node.meta.get("bucket", (node.name, 0))
            buckets[name].append(node)
    insertions = []
    for bucket, nodes in buckets.items():
        gathers = is_call(nodes[0], UNSHARD)
        anchor = nodes[0] if gathers else nodes[-1]
        nodes.sort(key=lambda node: node.meta.get("bucket", ("", 0))[1])
        shards = [shard_placeholder(node).name for node in nodes]
        unit = ctx.params[shards[0]].unit
        partials = ["" if gathers or PARTIAL + name not in placeholders else PARTIAL + name for name in shards]
        insertions.append(
            Insertion(
                bucket,
                unit,
                tuple(node.name for node in nodes),
                tuple(ctx.params[name].fqn for name in shards),
                anchor.name,
                ctx.flags.settings(unit),
                tuple(partials),
                nodes[0].meta.get("steps", ()),
                nodes[0].meta.get("coalesced", False),
            )
        )
    return CollectivesEdit(tuple(insertions))


def apply(graph: Graph, edit: CollectivesEdit) -> None:
    """Inserts what `edit` names, then erases the markers."""
    by_name = {node.name: node for node in graph.nodes}
    replacements, done = Replacements(graph), list[Node]()
    for insertion in edit.insertions:
        markers = [by_name[name] for name in insertion.markers]
        build = Builder(graph, by_name[insertion.anchor], bucket_of=insertion.bucket)
        if insertion.steps:
            build.meta["steps"] = insertion.steps
        bucket, unit, fqns, settings = insertion.bucket, insertion.unit, insertion.fqns, insertion.settings
        coalesced = insertion.coalesced
        if is_call(markers[0], UNSHARD):
            results = emit_gather(build, markers, bucket, unit, fqns, settings.custom_all_gather, coalesced)
        else:
            partials = [by_name.get(name) for name in insertion.partials]
            results = emit_reduction(build, markers, bucket, unit, fqns, settings, partials, coalesced)
        for marker, result in zip(markers, results, strict=True):
            replacements.put_alike(marker, result)
        done += markers
    replacements.finish()
    for marker in done:  # last: they are the anchors
        graph.erase_node(marker)
