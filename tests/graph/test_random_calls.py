"""Random operators that a checkpoint computes again: attention without dropout is none of them; the others cost what
they run, and equal layers with generators stay equal.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._prims.rng_prims import graphsafe_run_with_rng_state
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.utils.checkpoint import checkpoint

from graphshard.compat.random_calls import call_of, give_values
from graphshard.cost.compute import node_flops
from graphshard.graph.liveness import allocations_of, bytes_of
from graphshard.graph.stretches import Stretch, cut
from tests.graph.traced_model import Traced

FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default


def attention(dropout: float) -> Traced:
    """Checkpointed attention, traced."""

    def body(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True, dropout_p=dropout)

    def forward(x: Tensor) -> Tensor:
        out: Tensor = checkpoint(body, x.cos(), use_reentrant=False)
        return out.square().sum()

    traced = Traced(forward)
    traced.run(torch.randn(1, 2, 8, 16, requires_grad=True)).backward()
    return traced


def attentions(traced: Traced) -> list[Node]:
    """Forward calls, in both graphs."""
    nodes = [node for direction in ("forward", "backward") for node in traced.graphs[direction].graph.nodes]
    packets = [getattr(call_of(node).target, "overloadpacket", None) for node in nodes]
    return [
        node
        for node, packet in zip(nodes, packets, strict=True)
        if "dot_product" in str(packet) and "backward" not in str(packet)
    ]


def test_attention_without_dropout_has_no_state_of_random_numbers() -> None:
    found = attentions(attention(0.0))
    assert len(found) == 2 and all(call_of(node).target is node.target for node in found)
    assert all(isinstance(node.meta["val"], tuple) for node in found)


def test_every_operator_that_draws_again_has_a_value() -> None:
    graphs = attention(0.5).graphs.values()
    drawing = [node for gm in graphs for node in gm.graph.nodes if call_of(node).target is not node.target]
    assert len(drawing) == 2
    (_, drawn), again = (node.meta["val"] for node in drawing)
    assert str(drawn) == str(again)


def on_cuda(layers: int) -> Graph:
    """Layers of attention with dropout as torch's partitioner leaves them on CUDA: a generator for each."""
    with FakeTensorMode():
        value = torch.empty(1, 8, 16, 64)
    graph = Graph()

    def add(node: Node, val: Any, **meta: Any) -> Node:
        node.meta.update(val=val, **meta)
        return node

    x = add(graph.placeholder("x"), value)
    generators = [add(graph.placeholder(f"fwd_rng_state_{i}"), torch.Generator()) for i in range(layers)]
    for generator in generators:
        x = add(graph.call_function(torch.ops.aten.relu.default, (x,)), value, seam=True)
        kwargs = {"rng_state": generator}
        run = graph.call_function(graphsafe_run_with_rng_state, (FLASH, x, x, x, 0.5, True), kwargs)
        x = add(graph.call_function(operator.getitem, (run, 0)), value)
    graph.output((x,))
    return graph


def test_layers_with_generators_of_their_own_are_equal_stretches() -> None:
    first, second = (step.key() for step in cut(on_cuda(2)) if isinstance(step, Stretch))
    assert first == second


def test_what_draws_again_costs_what_it_runs() -> None:
    graph = on_cuda(1)
    give_values(graph)
    (run,) = graph.find_nodes(op="call_function", target=graphsafe_run_with_rng_state)
    plain = graph.call_function(*call_of(run))
    plain.meta["val"] = run.meta["val"]
    assert node_flops(run) == node_flops(plain) > 0
    whole, *_ = allocations_of(graph)[run]
    assert bytes_of(whole) == 8 * 16 * 64 * 4
