"""One unshard for all reads in a captured graph, moved out of `no_grad` where a later read needs a gradient."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph, Node

from graphshard.graph.ir import PassContext, unshards
from graphshard.graph.markers import UNSHARD, ShardSpec
from graphshard.passes import share_reads

SPEC = str(ShardSpec((4, 2), torch.float32, torch.float32, 0, 2, "0"))
CTX = PassContext("captured")


def captured(*events: str) -> tuple[Graph, list[Node]]:
    """A graph of events: ``off`` and ``on`` switch gradients, any other name reads that parameter."""
    graph = Graph()
    shards = {name: graph.placeholder(name) for name in dict.fromkeys(events) if name not in ("on", "off")}
    uses = []
    for event in events:
        if event in ("on", "off"):
            graph.call_function(torch._C._set_grad_enabled, (event == "on",))
        else:
            uses.append(graph.call_function(torch.neg, (graph.call_function(UNSHARD, (shards[event], SPEC)),)))
    graph.output(tuple(uses))
    return graph, uses


def run(graph: Graph) -> share_reads.ReadsEdit:
    edit = share_reads.decide(graph, CTX)
    share_reads.apply(graph, edit)
    graph.lint()
    assert not share_reads.decide(graph, CTX)
    return edit


@pytest.mark.parametrize("events", [(), ("a",), ("a", "b"), ("off", "a", "on", "b")])
def test_single_reads_are_left_alone(events: tuple[str, ...]) -> None:
    graph, _ = captured(*events)
    assert not run(graph)


def test_all_reads_of_a_parameter_become_the_first() -> None:
    graph, (first, other, second, third) = captured("a", "b", "a", "a")
    run(graph)
    assert len(unshards(graph)) == 2
    assert first.args == second.args == third.args != other.args


def test_a_read_that_needs_a_gradient_moves_before_the_switch_of_the_first() -> None:
    graph, (first, second) = captured("off", "a", "on", "a")
    _, needs_gradient = unshards(graph)
    run(graph)
    (node,) = unshards(graph)
    assert node is needs_gradient and node.next.target is torch._C._set_grad_enabled and node.next.args == (False,)
    assert first.args == second.args == (node,)


def test_nested_switches_move_to_the_outermost() -> None:
    graph, _ = captured("off", "off", "a", "on", "a")
    run(graph)
    (node,) = unshards(graph)
    assert node.prev.op == "placeholder"


def test_reads_that_need_no_gradient_stay_where_they_are() -> None:
    graph, _ = captured("off", "a", "a", "on")
    run(graph)
    (node,) = unshards(graph)
    assert node.prev.target is torch._C._set_grad_enabled
