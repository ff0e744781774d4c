"""Gradients that a forward asks for itself (`torch.autograd.grad`, `backward`), as Dynamo captures them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graphshard.graph.elsewhere import ELSEWHERE
from graphshard.graph.ir import is_call
from graphshard.graph.markers import UNSHARD


def asks_for_gradients(gm: GraphModule) -> bool:
    """Whether a captured graph calls `torch.autograd.grad`, as Dynamo has it call for `backward`, too."""
    return next(_calls(gm, torch.autograd.grad), None) is not None


def asked_of_inputs(gm: GraphModule) -> list[int]:
    """Inputs of a captured graph whose gradients it asks for, as `backward` does of all leaves: their positions."""
    place = {node: at for at, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    return [place[node] for call in _calls(gm, torch.autograd.grad) for node in _asked(call) if node in place]


def read_apart(gm: GraphModule) -> list[Node]:
    """Shards of whose gathered parameter a captured graph asks for the gradient of one read, and computes from another
    one, or (a block that is not traced) from none that it knows: the gradient would lack what these contribute.
    """
    found: dict[Node, None] = {}
    for inner in _graphs(gm):
        reads: defaultdict[Any, list[Node]] = defaultdict(list)  # so far, of each shard
        for node in inner.graph.nodes:
            if is_call(node, UNSHARD):
                reads[node.args].append(node)
            elif is_call(node, torch.autograd.grad):
                for asked in _asked(node):
                    read = asked.all_input_nodes[0] if is_call(asked, ELSEWHERE) else asked
                    if is_call(read, UNSHARD) and (len(reads[read.args]) > 1 or {*asked.users} == {node}):
                        found[read.all_input_nodes[0]] = None
    return list(found)


def _asked(call: Node) -> list[Node]:
    asked: Any = call.args[1] if len(call.args) > 1 else call.kwargs["inputs"]
    return [node for node in (asked if isinstance(asked, (list, tuple)) else [asked]) if isinstance(node, Node)]


def _graphs(gm: GraphModule) -> Iterator[GraphModule]:
    return (inner for inner in gm.modules() if isinstance(inner, GraphModule))


def _calls(gm: GraphModule, target: Any) -> Iterator[Node]:
    for inner in _graphs(gm):
        yield from inner.graph.find_nodes(op="call_function", target=target)
