"""Gradients that a forward asks for itself (`torch.autograd.grad`, `backward`), as Dynamo captures them."""

from __future__ import annotations

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


def read_for_gradients_alone(gm: GraphModule) -> list[Node]:
    """Shards whose gathered parameter a captured graph reads to ask for its gradient alone: what it computes comes from
    another read, of which this one is no part.
    """
    found: dict[Node, None] = {}
    for call in _calls(gm, torch.autograd.grad):
        for node in _asked(call):
            read = node.all_input_nodes[0] if is_call(node, ELSEWHERE) else node
            if {*node.users} == {call} and is_call(read, UNSHARD):
                found[read.all_input_nodes[0]] = None
    return list(found)


def _asked(call: Node) -> list[Node]:
    asked: Any = call.args[1] if len(call.args) > 1 else call.kwargs["inputs"]
    return [node for node in (asked if isinstance(asked, (list, tuple)) else [asked]) if isinstance(node, Node)]


def _calls(gm: GraphModule, target: Any) -> Iterator[Node]:
    for inner in gm.modules():
        if isinstance(inner, GraphModule):
            yield from inner.graph.find_nodes(op="call_function", target=target)
