"""Of the aliases by which activations enter units, those stay that can change an order of sums."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph

from graphshard.graph.ir import ALIAS, Direction, PassContext, is_call
from graphshard.passes import sum_by_units

neg = torch.ops.aten.neg.default


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


@pytest.mark.parametrize(("uses", "others", "stays"), [(0, 2, False), (1, 0, False), (2, 0, False), (1, 1, True)])
def test_alias_stays_where_a_unit_and_others_use_a_value(uses: int, others: int, stays: bool) -> None:
    assert left(entered(uses, others)) == ["alias_default"] * stays


def test_result_of_the_graph_is_another_use() -> None:
    graph = Graph()
    value = graph.placeholder("x")
    graph.output((graph.call_function(neg, (graph.call_function(ALIAS, (value,)),)), value))
    assert left(graph) == ["alias_default"]


def test_value_that_enters_a_unit_twice_stays_two() -> None:
    graph = Graph()
    value = graph.placeholder("x")
    aliases = [graph.call_function(ALIAS, (value,)) for _ in range(2)]
    graph.output(tuple(graph.call_function(neg, (alias,)) for alias in aliases))
    assert left(graph) == ["alias_default", "alias_default_1"]


def test_alias_that_nothing_uses_is_no_other_use() -> None:
    graph = Graph()
    value = graph.placeholder("x")
    aliases = [graph.call_function(ALIAS, (value,)) for _ in range(2)]
    graph.output((graph.call_function(neg, (aliases[1],)),))
    assert left(graph) == []


def nested(inner_uses: int, outer_uses: int, others: int) -> Graph:
    graph = Graph()
    value = graph.placeholder("x")
    outer = graph.call_function(ALIAS, (value,))
    inner = graph.call_function(ALIAS, (outer,))
    used = [*[inner] * inner_uses, *[outer] * outer_uses, *[value] * others]
    graph.output(tuple(graph.call_function(neg, (node,)) for node in used))
    return graph


def test_unit_in_a_unit_is_a_use_of_the_outer_one() -> None:
    assert left(nested(1, 0, 1)) == ["alias_default"]
    assert left(nested(1, 1, 0)) == ["alias_default_1"]
    assert left(nested(1, 1, 1)) == ["alias_default", "alias_default_1"]
    assert left(nested(1, 0, 0)) == []


@pytest.mark.parametrize(("direction", "stays"), [("captured", False), ("inner", True)])
def test_argument_of_an_inner_graph_may_have_other_uses(direction: Direction, stays: bool) -> None:
    graph = Graph()
    alias = graph.call_function(ALIAS, (graph.placeholder("x"),))
    graph.output(tuple(graph.call_function(neg, (alias,)) for _ in range(2)))
    assert left(graph, direction) == ["alias_default"] * stays
