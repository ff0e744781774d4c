"""One aten node costs what a roofline says; what runs no kernel costs nothing; fused chains pay once."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from graphshard.compat.tensors import fake_tensors
from graphshard.cost import HARDWARE, CostModel, node_flops
from graphshard.graph.ir import aten
from graphshard.graph.markers import UNSHARD

H200 = HARDWARE["h200"]
FUSED, UNFUSED = CostModel(HARDWARE["h100"]), CostModel(HARDWARE["h100"], fused=False)
KERNEL_US = HARDWARE["h100"].kernel_us
BYTES_PER_US = HARDWARE["h100"].memory_gb_s * 1e3
BF16 = torch.bfloat16


class Hand:
    """A graph built by hand: placeholders of a shape, and calls whose fake values are computed."""

    def __init__(self) -> None:
        self.graph, self.mode = Graph(), fake_tensors()

    def input(self, *shape: int, dtype: torch.dtype = BF16) -> Node:
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        with self.mode:
            node.meta["val"] = torch.empty(*shape, dtype=dtype)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        values = torch.fx.node.map_arg((args, kwargs), lambda source: source.meta["val"])
        with self.mode:
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def output(self, *results: Node) -> Graph:
        self.graph.output(results)
        return self.graph


def total_us(model: CostModel, graph: Graph) -> float:
    return sum(model.graph_us(graph).values())


def node_us(model: CostModel, node: Node) -> float:
    return model.graph_us(node.graph)[node]


def test_large_matmul_takes_what_was_measured() -> None:
    hand = Hand()
    node = hand.call(aten.mm.default, hand.input(8192, 8192), hand.input(8192, 8192))
    assert node_us(CostModel(H200), node) == pytest.approx(1395, rel=0.01)
    assert node_flops(node) == 2 * 8192**3


def test_thin_matmul_is_bound_by_memory_and_tiny_one_by_its_launch() -> None:
    hand = Hand()
    thin = hand.call(aten.mm.default, hand.input(1, 8192), hand.input(8192, 8192))
    assert node_us(FUSED, thin) == pytest.approx(2 * (8192**2 + 2 * 8192) / BYTES_PER_US)
    assert node_us(FUSED, hand.call(aten.mm.default, hand.input(2, 2), hand.input(2, 2))) == KERNEL_US


def test_matmul_runs_at_the_rate_of_its_dtype() -> None:
    hand = Hand()
    times = {}
    for dtype in (BF16, torch.float32, torch.int32):
        left, right = (hand.input(4096, 4096, dtype=dtype) for _ in range(2))
        times[dtype] = node_us(FUSED, hand.call(aten.mm.default, left, right))
    rates = HARDWARE["h100"].matmul_tflops
    assert times[torch.float32] / times[BF16] == pytest.approx(rates["bfloat16"] / rates["float32"])
    assert times[torch.int32] == pytest.approx(2 * 4096**3 / min(rates.values()) / 1e6)  # unknown: the slowest


def test_attention_of_every_backend_counts_and_causal_counts_half() -> None:
    hand = Hand()
    heads = [hand.input(2, 8, 512, 64) for _ in range(3)]
    full = 4 * 2 * 8 * 512**2 * 64
    for op in (
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    ):
        for causal in (False, True):
            by_place, by_name = hand.call(op, *heads, 0.0, causal), hand.call(op, *heads, is_causal=causal)
            assert node_flops(by_place) == node_flops(by_name) == (full // 2 if causal else full)
    forward = hand.call(aten._scaled_dot_product_flash_attention_for_cpu.default, *heads, 0.0, True)
    out, logsumexp = (hand.call(operator.getitem, forward, index) for index in range(2))
    backward_op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    backward = hand.call(backward_op, out, *heads, out, logsumexp, 0.0, True)
    assert node_flops(backward) == full // 2 * 5 // 2
    share = HARDWARE["h100"].attention_share * HARDWARE["h100"].matmul_tflops["bfloat16"]
    assert node_us(FUSED, backward) == pytest.approx(node_flops(backward) / share / 1e6)


def test_convolution_and_grouped_matmul_have_flops() -> None:
    hand = Hand()
    images, kernel = hand.input(2, 3, 16, 16), hand.input(8, 3, 3, 3)
    rest = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    assert node_flops(hand.call(aten.convolution.default, images, kernel, *rest)) == 2 * 2 * 14 * 14 * 8 * 3 * 3 * 3
    node = hand.graph.call_function(aten._grouped_mm.default, (hand.input(32, 16), hand.input(4, 16, 8)))
    node.meta["val"] = hand.input(32, 8).meta["val"]
    assert node_flops(node) == 2 * 32 * 16 * 8
    assert node_us(UNFUSED, node) == node_us(FUSED, node) == KERNEL_US


@pytest.mark.parametrize("model", [FUSED, UNFUSED], ids=["fused", "unfused"])
def test_what_runs_no_kernel_costs_nothing(model: CostModel) -> None:
    hand = Hand()
    x = hand.input(1024, 1024)
    split = hand.call(aten.split.Tensor, x, 512)
    free = [
        x,
        split,
        hand.call(operator.getitem, split, 0),
        hand.call(aten.view.default, x, [-1]),
        hand.call(aten._unsafe_view.default, x, [-1]),
        hand.call(aten.reshape.default, x, [-1]),
        hand.call(aten.t.default, x),
        hand.call(aten.expand.default, hand.input(1, 1024), [1024, 1024]),
        hand.call(aten.empty.memory_format, [1024, 1024]),
        hand.call(torch.ops.prims.convert_element_type.default, x, BF16),
    ]
    for target in (
        UNSHARD,
        torch.ops._c10d_functional.all_gather_into_tensor.default,
        torch.ops._c10d_functional.wait_tensor.default,
    ):
        node = hand.graph.call_function(target, (x,))
        node.meta["val"] = x.meta["val"]
        free.append(node)
    output = hand.output(*free)
    assert [*model.graph_us(output).values()] == [0.0] * len(output.nodes)


def chain(hand: Hand) -> tuple[Node, ...]:
    """exp(x) * x, its sum: one kernel of Inductor's."""
    x = hand.input(4096, 4096)
    product = hand.call(aten.mul.Tensor, hand.call(aten.exp.default, x), x)
    return x, product, hand.call(aten.sum.dim_IntList, product, [1])


def test_fused_chain_reads_inputs_once_and_writes_results_only() -> None:
    hand = Hand()
    _, product, total = chain(hand)
    graph = hand.output(total)
    tensor_us = 4096**2 * 2 / BYTES_PER_US
    assert total_us(FUSED, graph) == pytest.approx(tensor_us + KERNEL_US)
    assert node_us(FUSED, product) == 0.0
    assert total_us(UNFUSED, graph) == pytest.approx((2 + 3 + 1) * tensor_us, rel=0.01)


def test_fused_chain_writes_what_a_matmul_or_the_output_reads() -> None:
    hand = Hand()
    x, product, total = chain(hand)
    hand.call(aten.mm.default, hand.call(aten.t.default, product), x)
    hand.output(total)
    assert node_us(FUSED, product) == pytest.approx(4096**2 * 2 / BYTES_PER_US)


def test_values_that_pass_a_matmul_are_written_and_read_again() -> None:
    hand = Hand()
    x = hand.input(4096, 4096)
    before = hand.call(aten.exp.default, x)
    matmul = hand.call(aten.mm.default, x, x)
    after = hand.call(aten.add.Tensor, before, matmul)
    hand.output(after)
    tensor_us = 4096**2 * 2 / BYTES_PER_US
    assert node_us(FUSED, before) == pytest.approx(2 * tensor_us)
    assert node_us(FUSED, after) == pytest.approx(3 * tensor_us)


def test_results_of_a_tuple_are_written_only_where_they_are_used() -> None:
    hand = Hand()
    norm = hand.call(aten.var_mean.correction, hand.input(4096, 4096), [1])
    kept = hand.call(operator.getitem, norm, 0)
    hand.call(operator.getitem, norm, 1)
    hand.output(kept)
    assert node_us(FUSED, norm) == pytest.approx((4096**2 + 4096) * 2 / BYTES_PER_US)


def test_embedding_reads_the_rows_it_yields() -> None:
    hand = Hand()
    node = hand.call(aten.embedding.default, hand.input(128_000, 4096), hand.input(4096, dtype=torch.int64))
    assert node_us(UNFUSED, node) == pytest.approx((2 * 4096**2 * 2 + 4096 * 8) / BYTES_PER_US)


def test_copy_writes_its_target_without_reading_it() -> None:
    hand = Hand()
    target, source = hand.input(4096, 4096), hand.input(4096, 4096)
    node = hand.call(aten.copy_.default, target, source)
    for model in (FUSED, UNFUSED):
        assert node_us(model, node) == pytest.approx(2 * 4096**2 * 2 / BYTES_PER_US)


def test_broadcast_reads_each_element_once() -> None:
    hand = Hand()
    row = hand.call(aten.expand.default, hand.input(1, 4096), [4096, 4096])
    node = hand.call(aten.clone.default, row, memory_format=torch.contiguous_format)
    assert node_us(UNFUSED, node) == pytest.approx((4096 + 4096**2) * 2 / BYTES_PER_US)


def test_symbolic_sizes_cost_what_they_were_traced_with() -> None:
    def run(x: Tensor, weight: Tensor) -> Tensor:
        return torch.softmax(x.unflatten(0, (-1, 16)).flatten(0, 1) @ weight, -1)

    inputs = torch.empty(512, 1024), torch.empty(1024, 2048)
    for model in (FUSED, UNFUSED):
        symbolic, static = (
            total_us(model, make_fx(run, tracing_mode=mode)(*inputs).graph) for mode in ("symbolic", "fake")
        )
        assert type(symbolic) is float
        assert symbolic == static > 0


def _graphs() -> st.SearchStrategy[tuple[Callable[..., Tensor], int, int]]:
    functions: list[Callable[..., Tensor]] = [
        lambda x: torch.softmax(x, -1).sum(),
        lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]) @ x.T,
        lambda x: torch.cat([x, x.cos()]).cumsum(0),
        lambda x: x.sort().values[:1] + x.new_ones(1),
        lambda x: torch.where(x > 0, x, 0).to(torch.float64),
    ]
    return st.tuples(st.sampled_from(functions), st.integers(1, 64), st.integers(1, 64))


@given(_graphs(), st.sampled_from(sorted(HARDWARE)))
def test_costs_are_finite_and_fusing_never_costs_more(case: tuple[Callable[..., Tensor], int, int], name: str) -> None:
    function, rows, columns = case
    graph = make_fx(function, tracing_mode="fake")(torch.empty(rows, columns)).graph
    fused, unfused = (CostModel(HARDWARE[name], fused=fused).graph_us(graph) for fused in (True, False))
    for node in graph.nodes:
        assert 0 <= fused[node] <= unfused[node]
        assert math.isfinite(unfused[node])


def test_copies_cost_bytes_or_launches() -> None:
    assert FUSED.copy_us(29_000_000) == pytest.approx(10.0)
    assert FUSED.copy_us(0, kernels=3) == 3 * KERNEL_US
    with pytest.raises(ValueError, match="got -1 bytes in 1 kernels"):
        FUSED.copy_us(-1)
