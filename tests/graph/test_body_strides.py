"""Results of compiled bodies have the strides of the graph."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphshard.compat.body_strides import InStrides, StridesUnknown, other_strides
from graphshard.compat.inductor import compile_body


def test_body_gives_the_strides_of_its_graph() -> None:
    new = random.random()  # nothing in Inductor's cache

    def body(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y = x.permute(0, 2, 1).sin() * new
        return y[:, :, :64], torch.bmm(y, weight)  # which has y in another order: of its slice a copy is made

    gm = make_fx(body, tracing_mode="fake")(torch.ones(2, 80, 12), torch.ones(2, 80, 5))
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    with tracing(TracingContext(values[0].fake_mode)):
        run = compile_body(gm, values, {"is_backward": False})
    x, weight = torch.rand(2, 80, 12), torch.rand(2, 80, 5)
    for got, want in zip(run([x, weight]), body(x, weight), strict=True):
        assert got.stride() == want.stride()
        torch.testing.assert_close(got, want)


def test_expanded_result_is_expanded_again() -> None:
    want = torch.rand(4, 1).expand(4, 5)
    (got,) = InStrides(lambda args: [args.pop().contiguous()], {0: want.stride()})([want])
    assert got.stride() == want.stride()
    assert torch.equal(got, want)


def test_strides_that_depend_on_sizes_are_those_of_each_call() -> None:
    gm = make_fx(lambda x: (x.sin()[:, :3],), tracing_mode="symbolic")(torch.ones(4, 8))
    value = next(iter(gm.graph.find_nodes(op="output"))).args[0][0].meta["val"]
    wide = value.stride()[0]
    assert other_strides([(str(wide), "1")], [value]) == {}
    others = other_strides([("3", "1")], [value])
    assert others == {0: (wide, 1)}
    code = InStrides(lambda args: [args[0].contiguous()], others, [value, wide])
    for width in (8, 12, 8):
        (got,) = code([torch.ones(4, width)[:, :3], width])
        assert got.stride() == (width, 1)
    with pytest.raises(StridesUnknown):
        InStrides(lambda args: args, others, [value])


def test_body_is_given_a_symbol_that_has_turned_out_to_be_another() -> None:
    new = random.random()  # nothing in Inductor's cache
    mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False), static_shapes=False)  # type: ignore[no-untyped-call]
    lengths = [mode.from_tensor(torch.ones(4, 8)).shape[0] for _ in range(2)]
    assert lengths[0] == lengths[1]
    (came,) = (length for length in lengths if length.node._expr != length.node.expr)
    graph = Graph()
    flat, length = graph.placeholder("flat"), graph.placeholder("length")
    with mode:
        length.meta["val"], flat.meta["val"] = came, torch.ones(2 * came, 8)
        view = graph.call_function(torch.ops.aten.view.default, (flat, [2, length, 8]))
        result = graph.call_function(torch.ops.aten.mul.Tensor, (view, new))
        view.meta["val"] = flat.meta["val"].view(2, came, 8)
        result.meta["val"] = view.meta["val"] * new
    graph.output((result,))
    with tracing(TracingContext(mode)):
        run = compile_body(GraphModule({}, graph), [flat.meta["val"], came], {"is_backward": False})
    given = torch.rand(10, 8)
    torch.testing.assert_close(run([given, 5])[0], given.view(2, 5, 8) * new)
