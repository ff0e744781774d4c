"""Of the aliases by which activations enter units, those stay that change an order of sums."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from graphshard.graph.ir import Direction, PassContext, is_call
from graphshard.graph.markers import ALIAS
from graphshard.passes import sum_by_units

add, neg = torch.ops.aten.add.Tensor, torch.ops.aten.neg.default


def left(graph: Graph, direction: Direction = "captured") -> list[str]:
    """Names of the aliases that the pass leaves."""
    edit = sum_by_units.decide(graph, PassContext(direction))
    sum_by_units.apply(graph, edit)
    graph.lint()
    assert not sum_by_units.decide(graph, PassContext(direction))
    return [node.name for node in graph.nodes if is_call(node, ALIAS)]


def entered(uses: int, others: int) -> Graph:
    """One value, used by a unit and by others."""
    graph = Graph()
    value = graph.call_function(neg, (graph.placeholder("x"),))
    outside = [graph.call_function(neg, (value,)) for _ in range(others)]
    alias = graph.call_function(ALIAS, (value,))
    graph.output((*outside, *(graph.call_function(neg, (alias,)) for _ in range(uses))))
    return graph


@pytest.mark.parametrize(("uses", "others", "stays"), [(0, 2, False), (1, 2, False), (2, 0, False), (2, 1, True)])
def test_alias_stays_where_a_unit_and_others_use_a_value_more_than_once(uses: int, others: int, stays: bool) -> None:
    assert left(entered(uses, others)) == ["alias_default"] * stays


def test_operator_that_takes_a_value_twice_uses_it_twice() -> None:
    graph = Graph()
    value = graph.placeholder("x")
    alias = graph.call_function(ALIAS, (value,))
    graph.output((graph.call_function(add, (alias, alias)), value))
    assert left(graph) == ["alias_default"]


def test_alias_that_a_later_graph_uses_stays() -> None:
    graph = Graph()
    alias = graph.call_function(ALIAS, (graph.placeholder("x"),))
    graph.output((alias, graph.call_function(neg, (alias,))))
    assert left(graph) == ["alias_default"]


def test_value_that_enters_a_unit_twice_stays_two() -> None:
    graph = Graph()
    value = graph.placeholder("x")
    aliases = [graph.call_function(ALIAS, (value,)) for _ in range(2)]
    graph.output((*(graph.call_function(neg, (alias,)) for alias in aliases), graph.call_function(neg, (value,))))
    assert left(graph) == ["alias_default", "alias_default_1"]


def nested(inner_uses: int, outer_uses: int) -> Graph:
    graph = Graph()
    value = graph.placeholder("x")
    outer = graph.call_function(ALIAS, (value,))
    inner = graph.call_function(ALIAS, (outer,))
    used = [*[inner] * inner_uses, *[outer] * outer_uses, value]
    graph.output(tuple(graph.call_function(neg, (node,)) for node in used))
    return graph


def test_uses_in_a_unit_in_a_unit_count_for_both() -> None:
    assert left(nested(2, 0)) == ["alias_default"]
    assert left(nested(1, 1)) == ["alias_default"]
    assert left(nested(2, 1)) == ["alias_default", "alias_default_1"]
    assert left(nested(1, 0)) == []


@pytest.mark.parametrize(("direction", "stays"), [("captured", False), ("inner", True)])
def test_argument_of_an_inner_graph_may_have_other_uses(direction: Direction, stays: bool) -> None:
    graph = Graph()
    alias = graph.call_function(ALIAS, (graph.placeholder("x"),))
    graph.output(tuple(graph.call_function(neg, (alias,)) for _ in range(2)))
    assert left(graph, direction) == ["alias_default"] * stays


def test_graph_that_takes_a_value_may_use_it_more_than_once() -> None:
    inner = Graph()
    inner.output(inner.call_function(neg, (inner.placeholder("x"),)))
    graph = Graph(GraphModule({}, inner))
    graph.owning_module.body = GraphModule({}, inner)  # type: ignore[union-attr, assignment]
    value = graph.placeholder("x")
    alias = graph.call_function(ALIAS, (value,))
    body: Node = graph.get_attr("body")
    graph.output((graph.call_function(torch.cond, (body, alias)), value))
    assert left(graph) == ["alias_default"]
