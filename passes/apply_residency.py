"""Takes what is gathered already as an argument, and hands out what is to stay gathered.

Needs: a forward, backward or inference graph with markers, duplicates folded. Leaves: an unshard only where this
program has to gather.

    %a = unshard(%s)   ->   resident:   %a is a new placeholder
                            rejoined:   %a = unshard(%post_s), over the smaller group
                            kept:       the same; %a is one more result
                            resharded:  the same; %p = index(view(%a, [K, -1]), [%rank]) is one more result

New placeholders and results stand behind the graph's own, in the order of the flags. The rank inside the smaller group
is an argument: graphs are the same on every rank.
Source: FSDP2's `reshard_after_forward` (False; an int: shards over a smaller group) and `unshard()`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from graphshard.compat.results import keep_strides
from graphshard.graph.builder import Builder
from graphshard.graph.emit_reduction import rows_of
from graphshard.graph.ir import (
    PassContext,
    aten,
    fake_empty,
    output_args,
    output_node,
    shard_placeholder,
    spec_of,
    unshards,
    val,
)
from graphshard.graph.markers import UNSHARD, padded_shape
from graphshard.graph.rewriting import Placeholders

RESIDENT, REJOINED, RANK = "resident_", "post_", "rank_in_"
_KEPT = "kept"


@dataclass(frozen=True)
class ResidencyEdit:
    """Unshards by name, each with what it needs.

    Attributes:
        resident: (unshard, its shard).
        rejoined: (unshard, its shard, number of post-forward shards, their group).
        kept: unshards.
        resharded: (unshard, number of post-forward shards, their group).
    """

    resident: tuple[tuple[str, str], ...]
    rejoined: tuple[tuple[str, str, int, str], ...]
    kept: tuple[str, ...]
    resharded: tuple[tuple[str, int, str], ...]

    def __bool__(self) -> bool:
        return bool(self.resident or self.rejoined or self.kept or self.resharded)


def decide(graph: Graph, ctx: PassContext) -> ResidencyEdit:
    """Matches the flags with the unshards of this graph."""
    flags = ctx.flags
    by_shard = {shard_placeholder(node).name: node for node in unshards(graph)}
    gathers = {name: by_shard.get(REJOINED + name) or by_shard[name] for name in flags.kept}
    done = any(node.op == "placeholder" and node.name.startswith(RANK) for node in graph.nodes)

    def post_forward(name: str) -> tuple[int, str]:
        found = ctx.params[name].post_forward
        assert found is not None, name
        return found

    return ResidencyEdit(
        tuple((by_shard[name].name, name) for name in flags.resident if name in by_shard),
        tuple((by_shard[name].name, name, *post_forward(name)) for name in flags.rejoined if name in by_shard),
        tuple(node.name for node in gathers.values() if _KEPT not in node.meta),
        () if done else tuple((by_shard[name].name, *post_forward(name)) for name in flags.resharded),
    )


def apply(graph: Graph, edit: ResidencyEdit) -> None:
    """Rewrites the unshards that `edit` names."""
    by_name, placeholders = {node.name: node for node in graph.nodes}, Placeholders(graph)
    for name, shard in edit.resident:
        node = by_name[name]
        gathered = fake_empty(val(node), val(node).shape, val(node).dtype)
        placeholder = placeholders.add(RESIDENT + shard, gathered)
        node.replace_all_uses_with(placeholder)
        graph.erase_node(node)
    for name, shard, count, group in edit.rejoined:
        by_name[name] = _rejoin(graph, placeholders, by_name[name], REJOINED + shard, count, group)
    results = [by_name[name] for name in edit.kept]
    for node in results:
        node.meta[_KEPT] = True
    if edit.resharded:
        ranks = _ranks(placeholders, edit, val(by_name[edit.resharded[0][0]]))
        results += [_reshard(graph, by_name[name], ranks[group], count) for name, count, group in edit.resharded]
    if results:
        output_node(graph).args = ((*output_args(graph), *results),)
        keep_strides(output_node(graph), len(results))


def _rejoin(
    graph: Graph, placeholders: Placeholders, node: Node, placeholder_name: str, count: int, group: str
) -> Node:
    spec = replace(spec_of(node), world_size=count, group=group, device="")
    numel = math.prod(padded_shape(spec.size, count, spec.dim)) // count
    placeholder = placeholders.add(placeholder_name, fake_empty(val(node), [numel], val(node).dtype))
    build = Builder(graph, node)
    rejoined = build.call(UNSHARD, placeholder, str(spec))
    node.replace_all_uses_with(rejoined)
    graph.erase_node(node)
    return rejoined


def _ranks(placeholders: Placeholders, edit: ResidencyEdit, like: torch.Tensor) -> dict[str, Node]:
    """One placeholder for each smaller group: this rank in it, `[1]`, int64."""
    found = {}
    for group in dict.fromkeys(group for _, _, group in edit.resharded):
        found[group] = placeholders.add(RANK + group, fake_empty(like, [1], torch.int64))
    return found


def _reshard(graph: Graph, node: Node, rank: Node, count: int) -> Node:
    """Right behind the gather, so that the full parameter is free after its last use."""
    build = Builder(graph, node.next)
    rows = rows_of(build, node, count, spec_of(node).dim)
    return build.reshape(build.call(aten.index.Tensor, rows, [rank]), [val(rows).shape[1]])
