"""AOTAutograd's check of what custom operators return, in a graph's first run: it sees users' operators only."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from graphshard.compat import dispatch
from graphshard.compat.dispatch import without_alias_check


def _add_one(x: Tensor) -> None:
    x.add_(1)


LIBRARY = torch.library.Library("of_a_user", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define("twice(Tensor x) -> Tensor")
LIBRARY.define("add_one(Tensor(a!) x) -> ()")
LIBRARY.impl("add_one", _add_one, "CompositeExplicitAutograd")
LIBRARY.impl("twice", lambda x: 2 * x, "CompositeExplicitAutograd")


def program(operator: torch._ops.OpOverload, nested: bool = False) -> GraphModule:
    graph = Graph()
    graph.output((graph.call_function(operator, (graph.placeholder("x"),)),))
    gm = GraphModule(torch.nn.Module(), graph)
    if not nested:
        return gm
    outer = Graph()
    outer.output((outer.call_module("body", (outer.placeholder("x"),)),))
    return GraphModule({"body": gm}, outer)


def seen_in(gm: GraphModule, mode: type) -> list[object]:
    seen = list[object]()

    def run(args: list[Tensor]) -> list[Tensor]:
        seen.append(type(_get_current_dispatch_mode()))
        return [gm(*args)[0]]

    checked = without_alias_check(run, gm)
    with mode():
        (result,) = checked([torch.ones(2)])
        assert type(_get_current_dispatch_mode()) is mode
    torch.testing.assert_close(result, gm(torch.ones(2))[0])
    return seen


CHECK = dispatch._ALIAS_CHECK


@pytest.mark.skipif(CHECK is None, reason="this torch has no such check")
def test_the_check_sees_no_program_of_torchs_operators() -> None:
    assert CHECK is not None
    assert seen_in(program(torch.ops.aten.relu.default), CHECK) == [type(None)]


@pytest.mark.skipif(CHECK is None, reason="this torch has no such check")
@pytest.mark.parametrize("nested", [False, True])
def test_the_check_sees_a_program_with_a_users_operator(nested: bool) -> None:
    assert CHECK is not None
    assert seen_in(program(torch.ops.of_a_user.twice.default, nested), CHECK) == [CHECK]


@pytest.mark.skipif(CHECK is None, reason="this torch has no such check")
def test_the_check_sees_a_program_with_a_users_operator_that_writes() -> None:
    assert CHECK is not None
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops.higher_order.auto_functionalized, (torch.ops.of_a_user.add_one.default,), {"x": x})
    graph.output((x,))
    assert seen_in(GraphModule(torch.nn.Module(), graph), CHECK) == [CHECK]


def test_another_mode_sees_each_program() -> None:
    class Passing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    assert seen_in(program(torch.ops.aten.relu.default), Passing) == [Passing]
