"""All-gathers over gloo write into outputs made for them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphshard.compat.inductor import INDUCTOR_PATCHES
from graphshard.graph.gather_outputs import GATHER_INTO, with_gather_outputs
from graphshard.graph.ir import ALL_GATHER, WAIT
from graphshard.graph.printer import format_graph
from graphshard.lowering import driver
from tests.graph.graphs import BF16, toy_forward, toy_weights


def always(group_name: str, device_type: str) -> bool:
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
%keep_until_default = keep_until(%wait_tensor_default, %cat_default) : None
%empty_memory_format_1 = empty([36], dtype=bf16, device=cpu) : bf16[36]
%all_gather_into_tensor_default_1 = all_gather_into_tensor_out(%convert_element_type_default_2, 2, '0', out=%empty_memory_format_1) : bf16[36]  # gather:root: head
%keep_until_default_1 = keep_until(%wait_tensor_default_1, %convert_element_type_default_2) : None""",  # noqa: E501
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
    assert with_gather_outputs(gm, lambda name, device_type: name != "0") is gm
    assert GATHER_INTO in targets(with_gather_outputs(gm, always))


def test_compiled_program_keeps_what_is_sent_until_it_has_arrived(tmp_path: Path) -> None:
    def program(first: Tensor, second: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        sent = torch.cat([first, second])
        arriving: Any = torch.ops._c10d_functional.all_gather_into_tensor(sent, 1, dist.group.WORLD.group_name)  # type: ignore[union-attr]
        x = (x @ x).relu() @ x  # results of as many bytes as `sent`
        return torch.ops._c10d_functional.wait_tensor(arriving) * 2, x

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        args = [torch.randn(2048), torch.randn(2048), torch.randn(64, 64)]
        gm = with_gather_outputs(make_fx(program, tracing_mode="fake")(*args))
        with inductor_config.patch(INDUCTOR_PATCHES), torch.no_grad():
            (got, _), (code,) = run_and_get_code(lambda: compile_fx_inner(gm, args)(list(args)))
    finally:
        dist.destroy_process_group()
    assert torch.equal(got, torch.cat(args[:2]) * 2)
    launch = re.search(r"all_gather_into_tensor_out\.default\((\w+),", code)
    assert launch is not None
    flight = code[launch.end() : code.index("wait_tensor.default(")]
    assert "mm(" in flight
    assert launch[1] not in flight, flight
