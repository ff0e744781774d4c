"""A backward graph in two programs computes what it computes in one."""

from __future__ import annotations

import torch
from graphs import F32, Weight
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from graphshard.compat.tensors import fake_tensors
from graphshard.graph.ir import aten, output_args, reductions, unshards
from graphshard.graph.markers import REDUCE_GRAD, UNSHARD
from graphshard.graph.split_backward import split_backward

WEIGHT = Weight("layer.weight", (4, 3), world_size=1)


def backward_of_two_uses() -> GraphModule:
    """Of `y = tanh(x @ w.t())`: the gradient behind tanh is needed by both halves, the gathered weight by one."""
    graph, mode = Graph(), fake_tensors()
    sizes = {"x": (2, 3), "shard": (12,), "y": (2, 4), "tangents_1": (2, 4)}
    nodes = {}
    for name, size in sizes.items():
        nodes[name] = graph.placeholder(name)
        with mode:
            nodes[name].meta["val"] = torch.empty(size, dtype=F32)

    def call(target: object, *args: object) -> Node:
        node = graph.call_function(target, args)  # type: ignore[arg-type]
        with mode:
            node.meta["val"] = target(*(a.meta["val"] if isinstance(a, Node) else a for a in args))  # type: ignore[operator]
        return node

    weight = call(UNSHARD, nodes["shard"], str(WEIGHT.spec))
    behind = call(aten.tanh_backward.default, nodes["tangents_1"], nodes["y"])
    grad_input = call(aten.mm.default, behind, weight)
    grad_weight = call(aten.mm.default, call(aten.t.default, behind), nodes["x"])
    reduced = call(REDUCE_GRAD, grad_weight, nodes["shard"], str(WEIGHT.spec))
    graph.output((grad_input, reduced, None))
    return GraphModule({}, graph)


def test_halves_compute_what_the_whole_does() -> None:
    torch.manual_seed(0)
    gm = backward_of_two_uses()
    args = [torch.randn(2, 3), torch.randn(12), torch.randn(2, 4), torch.randn(2, 4)]
    want: tuple[Tensor, ...] = gm(*args)
    halves = split_backward(gm)
    *now, handed = halves.inputs(*args)
    (later,) = halves.weights(*(args[i] for i in halves.taken), handed)
    assert torch.equal(now[0], want[0]) and now[1:] == [None, None]
    assert halves.positions == (1,) and torch.equal(later, want[1])


def test_first_half_reduces_nothing_and_second_gathers_nothing() -> None:
    halves = split_backward(backward_of_two_uses())
    assert not reductions(halves.inputs.graph) and unshards(halves.inputs.graph)
    assert reductions(halves.weights.graph) and not unshards(halves.weights.graph)


def test_argument_that_the_second_half_needs_not_is_not_kept_for_it() -> None:
    halves = split_backward(backward_of_two_uses())
    assert halves.taken == (0, 1)  # x and the shard, not y, not the tangent
    assert len(output_args(halves.inputs.graph)) == 4
