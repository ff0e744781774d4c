"""Printed graphs: one line per node, with what a launch carries."""

from __future__ import annotations

import torch

from graphshard.graph.ir import aten, launches
from graphshard.graph.printer import format_dtype, format_graph, format_node, format_type
from tests.graph.graphs import BF16, GraphBuilder, Weight, lowered_until, toy_forward, toy_weights, two_gathers


def test_printer_writes_one_line_per_node() -> None:
    marked = toy_forward(toy_weights())
    lines = format_graph(marked.graph).splitlines()
    assert len(lines) == len(marked.graph.nodes)
    assert lines[0] == "%x = placeholder : f32[4, 6]"
    assert lines[-1].startswith("return %mm_default, %x")


def test_printer_says_what_a_launch_carries() -> None:
    lowered = lowered_until(
        two_gathers(Weight("u.a", (4, 3), param_dtype=BF16), Weight("u.b", (4,), 1, param_dtype=BF16))
    )
    (launch,) = launches(lowered.graph)
    assert format_node(launch) == (
        "%all_gather_into_tensor_default = all_gather_into_tensor(%cat_default, 2, '0') : bf16[16]"
        "  # gather:u: u.a, u.b"
    )


def test_printer_points_at_a_node() -> None:
    marked = toy_forward(toy_weights())
    lines = format_graph(marked.graph, around=marked.node("relu_default"), reach=2).splitlines()
    assert len(lines) == 5
    assert [line[0] for line in lines] == [" ", " ", ">", " ", " "]
    assert lines[2].startswith("> %relu_default = relu(")
    assert len(format_graph(marked.graph, around=marked.node("x"), reach=2).splitlines()) == 3


def test_printer_knows_every_kind_of_argument_and_value() -> None:
    build = GraphBuilder()
    x = build.input("x", [4])
    clone = build.call(aten.clone.default, x, memory_format=torch.contiguous_format)
    parts = build.call(aten.split_with_sizes.default, clone, [1, 3])
    marked = build.finish(parts, None)
    lines = format_graph(marked.graph).splitlines()
    assert lines[1] == "%clone_default = clone(%x, memory_format=torch.contiguous_format) : f32[4]"
    assert lines[2] == "%split_with_sizes_default = split_with_sizes(%clone_default, [1, 3]) : (f32[1], f32[3])"
    assert lines[3] == "return %split_with_sizes_default, None"
    assert (format_type(None), format_type(3), format_dtype(torch.complex64)) == ("None", "int", "complex64")
