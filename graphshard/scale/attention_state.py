"""Takes the state of random numbers from attention that draws none.

Where attention is recomputed, the partitioner saves the state of the random numbers with it, even without dropout: the
operator is called by another, whose cost nobody knows. In a graph that is only looked at, the call itself will do.

    %p = run_and_save_rng_state(attention, %q, ...)   ->   %a = attention(%q, ...)
    %a = getitem(%p, 1)                                    and nothing is saved

    %a = run_with_rng_state(%state, attention, %q, ...)   ->   %a = attention(%q, ...)
"""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Graph, Node

from graphshard.compat.tensors import is_torch_operator
from graphshard.graph.builder import Builder
from graphshard.graph.ir import output_args, output_node

_SAVES, _RESTORES = "run_and_save_rng_state", ("run_with_rng_state", "graphsafe_run_with_rng_state")


def call_attention_itself(graph: Graph) -> None:
    """Rewrites every such call, in place."""
    for node in list(graph.nodes):
        name = _name(node.target)
        if node.op != "call_function" or (name != _SAVES and name not in _RESTORES):
            continue
        at = next(i for i, argument in enumerate(node.args) if is_torch_operator(argument))
        target: Any = node.args[at]
        kwargs = {key: value for key, value in node.kwargs.items() if key != "rng_state"}
        called = Builder(graph, node).call_with(target, node.args[at + 1 :], kwargs)
        if name == _SAVES:
            _replace_saved(graph, node, called)
        else:
            node.replace_all_uses_with(called)
            graph.erase_node(node)


def _replace_saved(graph: Graph, node: Node, called: Node) -> None:
    """`node` yields (state, result): the result is `called`, the state is nothing."""
    for part in list(node.users):
        assert part.target is operator.getitem, part
        if part.args[1] == 1:
            part.replace_all_uses_with(called)
        else:
            results = [None if result is part else result for result in output_args(graph)]
            output_node(graph).args = (tuple(results),)
        graph.erase_node(part)
    graph.erase_node(node)


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", "")
