"""Makes one program of a backward graph: what is reduced, what was accumulated before, what has no gradient.

Needs: a backward graph with markers. Leaves: reductions only where gradients are synchronized; one more placeholder
and one addition for each accumulated gradient; None where no gradient flows; nothing dead.

    %r = reduce_grad(%g, %s)   ->   unreduced:  return %g
                                    held:       %t = add(%held_s, %g);  %r = reduce_grad(%t, %s)
                                    undefined:  return None

The order of the sum (earlier gradients first) is that of autograd's accumulation in eager FSDP2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from graphshard.ir import (
    Builder,
    PassContext,
    aten,
    output_args,
    output_node,
    reductions,
    shard_placeholder,
    spec_of,
    val,
)

HELD_PREFIX = "held_"


@dataclass(frozen=True)
class FlagsEdit:
    """What to rewrite.

    Attributes:
        unreduced: names of reductions that go.
        held: (reduction, whether its gradient is cast before it is added) in argument order.
        dead_outputs: positions of results that become None.
    """

    unreduced: tuple[str, ...]
    held: tuple[tuple[str, bool], ...]
    dead_outputs: tuple[int, ...]

    def __bool__(self) -> bool:
        return bool(self.unreduced or self.held or self.dead_outputs)


def decide(graph: Graph, ctx: PassContext) -> FlagsEdit:
    """Matches the flags with the reductions of this graph."""
    if ctx.direction != "backward":
        return FlagsEdit((), (), ())
    by_shard = {shard_placeholder(node).name: node for node in reductions(graph)}
    done = {node.name for node in graph.nodes if node.op == "placeholder" and node.name.startswith(HELD_PREFIX)}
    held = tuple(
        (by_shard[name].name, ctx.params[name].adds_in_reduce_dtype)
        for name in ctx.flags.held
        if HELD_PREFIX + name not in done
    )
    unreduced = tuple(node.name for name, node in by_shard.items() if name in ctx.flags.unreduced)
    return FlagsEdit(unreduced, held, dead_outputs(graph, ctx.flags.undefined))


def dead_outputs(graph: Graph, undefined: frozenset[str]) -> tuple[int, ...]:
    """Positions of results that depend on `undefined` tangents and on no other tangent: in eager these gradients are
    None.
    """
    if not undefined:
        return ()
    # One sweep: whether a value depends on an undefined tangent, and whether on a defined one.
    reached: dict[Node, tuple[bool, bool]] = {}
    for node in graph.nodes:
        sources = [reached[source] for source in node.all_input_nodes]
        reached[node] = (
            node.name in undefined or any(absent for absent, _ in sources),
            (is_tangent(node) and node.name not in undefined) or any(present for _, present in sources),
        )
    results = enumerate(output_args(graph))
    return tuple(i for i, result in results if isinstance(result, Node) and reached[result] == (True, False))


def is_tangent(node: Node) -> bool:
    """Whether `node` is the placeholder of a gradient of an output."""
    return node.op == "placeholder" and str(node.target).startswith("tangents")


def apply(graph: Graph, edit: FlagsEdit) -> None:
    """Rewrites the reductions that `edit` names."""
    by_name = {node.name: node for node in graph.nodes}
    for name, cast_first in edit.held:
        _add_held(graph, by_name[name], cast_first)
    for name in edit.unreduced:
        node = by_name[name]
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    if edit.dead_outputs:
        output = output_node(graph)
        results = [None if i in edit.dead_outputs else result for i, result in enumerate(output_args(graph))]
        output.args = (tuple(results),)
        graph.eliminate_dead_code()


def _add_held(graph: Graph, reduction: Node, cast_first: bool) -> None:
    grad, reduce_dtype = reduction.args[0], spec_of(reduction).reduce_dtype
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        placeholder = graph.placeholder(HELD_PREFIX + shard_placeholder(reduction).name)
    value = val(grad)
    with value.fake_mode:
        placeholder.meta["val"] = torch.empty(value.shape, dtype=reduce_dtype, device=value.device)
    build = Builder(graph, reduction)
    total = build.call(aten.add.Tensor, placeholder, build.cast(grad, reduce_dtype) if cast_first else grad)
    reduction.update_arg(0, total)
