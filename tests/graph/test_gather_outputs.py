"""All-gathers over gloo write into outputs made for them."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphshard import driver
from graphshard.gather_outputs import GATHER_INTO, with_gather_outputs
from graphshard.ir import ALL_GATHER, WAIT
from graphshard.printer import format_graph
from tests.graph.graphs import BF16, toy_forward, toy_weights


def always(group_name: str) -> bool:
    return True


def lowered(world_size: int) -> GraphModule:
    marked = toy_forward(toy_weights(1, world_size=world_size, param_dtype=BF16))
    return driver.lower(marked.gm, marked.ctx, "test").gm


def targets(gm: GraphModule) -> list[object]:
    return [node.target for node in gm.graph.nodes]


def test_each_gather_gets_an_output_and_nothing_else_changes() -> None:
    gm = lowered(2)
    before = format_graph(gm.graph)
    runnable = with_gather_outputs(gm, always)
    assert format_graph(gm.graph) == before
    assert ALL_GATHER not in targets(runnable)
    changed = [line for line in format_graph(runnable.graph).splitlines() if line not in before.splitlines()]
    assert_expected_inline(
        "\n".join(changed),
        """\
%empty_memory_format = empty([42], dtype=bf16, device=cpu) : bf16[42]
%all_gather_into_tensor_default = all_gather_into_tensor_out(%cat_default, 2, '0', out=%empty_memory_format) : bf16[42]  # gather:blocks.0: blocks.0.weight, blocks.0.bias
%empty_memory_format_1 = empty([36], dtype=bf16, device=cpu) : bf16[36]
%all_gather_into_tensor_default_1 = all_gather_into_tensor_out(%convert_element_type_default_2, 2, '0', out=%empty_memory_format_1) : bf16[36]  # gather:root: head""",  # noqa: E501
    )


def gather_of(value: Tensor) -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    gathered = graph.call_function(ALL_GATHER, (x, 2, "0"))
    gathered.meta["val"] = value
    graph.output((graph.call_function(WAIT, (gathered,)),))
    return GraphModule({}, graph)


def test_other_devices_backends_and_symbolic_sizes_stay() -> None:
    symbolic = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.empty(4))
    for value in (torch.empty(4, device="meta"), symbolic):
        gm = gather_of(value)
        assert with_gather_outputs(gm, always) is gm
    gm = gather_of(torch.empty(4))
    assert with_gather_outputs(gm, lambda name: name != "0") is gm
    assert GATHER_INTO in targets(with_gather_outputs(gm, always))
