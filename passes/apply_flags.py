"""Makes one program of a backward graph: what is reduced, what was accumulated before, what has no gradient.

Needs: a backward graph with markers. Leaves: reductions only where gradients are synchronized; one more placeholder for
each gradient accumulated before; None where no gradient flows; nothing dead.

    %r = reduce_grad(%g, %s)   ->   unreduced:  return %g
                                    added:      %t = add(%held_s, %g);  %r = reduce_grad(%t, %s)
                                    partial:    one more placeholder, %partial_s, for the collective to add
                                    undefined:  return None

The order of the sum (earlier gradients first) is that of autograd's accumulation in eager FSDP2. Without
`set_requires_all_reduce`, a result is reduced over the shards only and stays in the reduce dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from graphshard.graph.builder import Builder
from graphshard.graph.ir import (
    PARTIAL,
    PassContext,
    aten,
    fake_empty,
    is_tangent,
    output_args,
    output_node,
    reductions,
    shard_placeholder,
    spec_of,
    val,
)
from graphshard.graph.rewriting import Placeholders, Replacements

HELD = "held_"


@dataclass(frozen=True)
class FlagsEdit:
    """What to rewrite.

    Attributes:
        unreduced: names of reductions that go.
        added: (reduction, dtype of the earlier gradient, whether this one is cast before it is added) in argument
            order.
        partial: reductions with an earlier partial gradient, in argument order.
        local: reductions whose result stays partial.
        dead_outputs: positions of results that become None.
    """

    unreduced: tuple[str, ...] = ()
    added: tuple[tuple[str, torch.dtype, bool], ...] = ()
    partial: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    dead_outputs: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.unreduced or self.added or self.partial or self.local or self.dead_outputs)


def decide(graph: Graph, ctx: PassContext) -> FlagsEdit:
    """Matches the flags with the reductions of this graph."""
    if ctx.direction != "backward":
        return FlagsEdit()
    flags = ctx.flags
    by_shard = {shard_placeholder(node).name: node for node in reductions(graph)}
    placeholders = [node.name for node in graph.nodes if node.op == "placeholder"]
    added: tuple[tuple[str, torch.dtype, bool], ...] = ()
    if not any(name.startswith(HELD) for name in placeholders):
        added = tuple(
            (
                by_shard[name].name,
                dtype,
                ctx.params[name].adds_in_reduce_dtype and dtype == _reduce_dtype(by_shard[name]),
            )
            for name, dtype in flags.added
        )
    local = tuple(
        node.name
        for name, node in by_shard.items()
        if name not in flags.unreduced
        and spec_of(node).replicas > 1
        and not flags.settings(ctx.params[name].unit).all_reduce
        and "partial" not in node.meta
    )
    return FlagsEdit(
        tuple(node.name for name, node in by_shard.items() if name in flags.unreduced),
        added,
        tuple(by_shard[name].name for name in flags.partial if PARTIAL + name not in placeholders),
        local,
        dead_outputs(graph, flags.undefined, flags.inputs_only),
    )


def dead_outputs(graph: Graph, undefined: frozenset[str], inputs_only: bool = False) -> tuple[int, ...]:
    """Positions of results that are None in eager.

    They depend on `undefined` tangents and on no other tangent, or are gradients of parameters where `inputs_only`.
    """
    dead = set()
    if inputs_only:
        reduced = set(reductions(graph))
        dead = {i for i, result in enumerate(output_args(graph)) if result in reduced}
    if undefined:
        # One sweep: whether a value depends on an undefined tangent, and whether on a defined one.
        reached: dict[Node, tuple[bool, bool]] = {}
        for node in graph.nodes:
            sources = [reached[source] for source in node.all_input_nodes]
            reached[node] = (
                node.name in undefined or any(absent for absent, _ in sources),
                (is_tangent(node) and node.name not in undefined) or any(present for _, present in sources),
            )
        results = enumerate(output_args(graph))
        dead |= {i for i, result in results if isinstance(result, Node) and reached[result] == (True, False)}
    return tuple(sorted(dead))


def _reduce_dtype(reduction: Node) -> torch.dtype:
    return spec_of(reduction).reduce_dtype


def apply(graph: Graph, edit: FlagsEdit) -> None:
    """Rewrites the reductions that `edit` names."""
    by_name, placeholders = {node.name: node for node in graph.nodes}, Placeholders(graph)
    for name, dtype, cast_first in edit.added:
        _add_held(graph, placeholders, by_name[name], dtype, cast_first)
    for name in edit.partial:
        placeholders.add(PARTIAL + shard_placeholder(by_name[name]).name, _partial(by_name[name]))
    for name in edit.local:
        by_name[name].meta.update(val=_partial(by_name[name]), partial=True)
    replacements = Replacements(graph)
    for name in edit.unreduced:
        replacements.put(by_name[name], _grad(by_name[name]))
    replacements.finish()
    for name in edit.unreduced:
        graph.erase_node(by_name[name])
    if edit.dead_outputs:
        output = output_node(graph)
        results = [None if i in edit.dead_outputs else result for i, result in enumerate(output_args(graph))]
        output.args = (tuple(results),)
        graph.eliminate_dead_code()


def _partial(reduction: Node) -> torch.Tensor:
    """Fake value of a partial gradient: it stays on the device of the gradient, also where the shard is offloaded."""
    return fake_empty(val(reduction.args[0]), val(reduction).shape, _reduce_dtype(reduction))


def _grad(reduction: Node) -> Node:
    grad = reduction.args[0]
    assert isinstance(grad, Node)
    return grad


def _add_held(graph: Graph, placeholders: Placeholders, reduction: Node, dtype: torch.dtype, cast_first: bool) -> None:
    grad = _grad(reduction)
    name = HELD + shard_placeholder(reduction).name
    while name in placeholders.names:  # what calls of this backward left, then what earlier backwards left
        name += "_"
    placeholder = placeholders.add(name, fake_empty(val(grad), val(grad).shape, dtype))
    build = Builder(graph, reduction)
    total = build.call(aten.add.Tensor, placeholder, build.cast(grad, dtype) if cast_first else grad)
    reduction.update_arg(0, total)
