"""Copies between tensors and flat buffers become one operator each, with the same results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx import Graph

from graphshard.fsdp2.settings import UnitSettings
from graphshard.graph.printer import format_graph
from graphshard.kernels import ops as kernels
from graphshard.lowering import driver
from graphshard.passes import fuse_copies
from tests.graph.graphs import BF16, F32, Marked, lowered_until, toy_backward, toy_forward, toy_weights, two_reductions
from tests.graph.lockstep import mesh_groups, run_ranks

FUSED = (kernels.GATHER_COPY_IN, kernels.GATHER_COPY_OUT, kernels.REDUCE_COPY_IN)
COPIES = (torch.ops.aten.cat.default, torch.ops.aten.clone.default, torch.ops.aten.constant_pad_nd.default)


def fused(marked: Marked) -> Graph:
    return driver.lower(marked.gm, replace(marked.ctx, fuses=True), "test").gm.graph


def calls(graph: Graph, *targets: Any) -> list[Any]:
    return [node for node in graph.nodes if node.target in targets]


def test_forward_reads_and_writes_buffers_by_one_operator_each() -> None:
    assert_expected_inline(
        format_graph(fused(toy_forward(toy_weights(1, world_size=2, param_dtype=BF16)))),
        """\
%x = placeholder : bf16[4, 6]
%blocks_0_weight_shard = placeholder : f32[18]
%blocks_0_bias_shard = placeholder : f32[3]
%head_shard = placeholder : f32[18]
%gather_copy_in_default = gather_copy_in([%blocks_0_weight_shard, %blocks_0_bias_shard], 'bfloat16,bfloat16') : bf16[21]
%all_gather_into_tensor_default = all_gather_into_tensor(%gather_copy_in_default, 2, '0') : bf16[42]  # gather:blocks.0: blocks.0.weight, blocks.0.bias
%wait_tensor_default = wait_tensor(%all_gather_into_tensor_default) : bf16[42]
%gather_copy_out_default = gather_copy_out(%wait_tensor_default, '6x6@0:bfloat16,6@0:bfloat16', 2) : (bf16[6, 6], bf16[6])
%getitem_2 = getitem(%gather_copy_out_default, 0) : bf16[6, 6]
%getitem_3 = getitem(%gather_copy_out_default, 1) : bf16[6]
%convert_element_type_default_2 = convert_element_type(%head_shard, bf16) : bf16[18]
%all_gather_into_tensor_default_1 = all_gather_into_tensor(%convert_element_type_default_2, 2, '0') : bf16[36]  # gather:root: head
%t_default = t(%getitem_2) : bf16[6, 6]
%addmm_default = addmm(%getitem_3, %x, %t_default) : bf16[4, 6]
%relu_default = relu(%addmm_default) : bf16[4, 6]
%wait_tensor_default_1 = wait_tensor(%all_gather_into_tensor_default_1) : bf16[36]
%reshape_default_3 = reshape(%wait_tensor_default_1, [6, 6]) : bf16[6, 6]
%slice_tensor = slice(%reshape_default_3, 0, 0, 5) : bf16[5, 6]
%t_default_1 = t(%slice_tensor) : bf16[6, 5]
%mm_default = mm(%relu_default, %t_default_1) : bf16[4, 5]
return %mm_default, %x, %relu_default
""",  # noqa: E501
    )


def test_backward_fills_buffers_by_one_operator_each() -> None:
    assert_expected_inline(
        format_graph(fused(toy_backward(toy_weights(1, world_size=4, param_dtype=BF16, reduce_dtype=F32)))),
        """\
%blocks_0_weight_shard = placeholder : f32[12]
%blocks_0_bias_shard = placeholder : f32[2]
%head_shard = placeholder : f32[12]
%hidden_0 = placeholder : bf16[4, 6]
%hidden_1 = placeholder : bf16[4, 6]
%tangents_1 = placeholder : bf16[4, 5]
%convert_element_type_default_1 = convert_element_type(%head_shard, bf16) : bf16[12]
%all_gather_into_tensor_default = all_gather_into_tensor(%convert_element_type_default_1, 4, '0') : bf16[48]  # gather:root: head
%t_default = t(%tangents_1) : bf16[5, 4]
%mm_default = mm(%t_default, %hidden_1) : bf16[5, 6]
%reduce_copy_in_default = reduce_copy_in([%mm_default], [0], 4, f32, None, None) : f32[48]
%reduce_scatter_tensor_default = reduce_scatter_tensor(%reduce_copy_in_default, 'avg', 4, '0') : f32[12]  # reduce:root: head
%wait_tensor_default_1 = wait_tensor(%all_gather_into_tensor_default) : bf16[48]
%reshape_default_2 = reshape(%wait_tensor_default_1, [8, 6]) : bf16[8, 6]
%slice_tensor = slice(%reshape_default_2, 0, 0, 5) : bf16[5, 6]
%mm_default_1 = mm(%tangents_1, %slice_tensor) : bf16[4, 6]
%threshold_backward_default = threshold_backward(%mm_default_1, %hidden_1, 0) : bf16[4, 6]
%sum_dim_int_list = sum(%threshold_backward_default, [0]) : bf16[6]
%t_default_1 = t(%threshold_backward_default) : bf16[6, 4]
%mm_default_2 = mm(%t_default_1, %hidden_0) : bf16[6, 6]
%wait_tensor_default = wait_tensor(%reduce_scatter_tensor_default) : f32[12]
%reduce_copy_in_default_1 = reduce_copy_in([%mm_default_2, %sum_dim_int_list], [0, 0], 4, f32, None, None) : f32[56]
%reduce_scatter_tensor_default_1 = reduce_scatter_tensor(%reduce_copy_in_default_1, 'avg', 4, '0') : f32[14]  # reduce:blocks.0: blocks.0.weight, blocks.0.bias
%wait_tensor_default_2 = wait_tensor(%reduce_scatter_tensor_default_1) : f32[14]
%split_with_sizes_default = split_with_sizes(%wait_tensor_default_2, [12, 2]) : (f32[12], f32[2])
%getitem = getitem(%split_with_sizes_default, 0) : f32[12]
%getitem_1 = getitem(%split_with_sizes_default, 1) : f32[2]
return %getitem, %getitem_1, %wait_tensor_default
""",  # noqa: E501
    )


@pytest.mark.parametrize("make", [toy_forward, toy_backward])
def test_pass_decides_nothing_twice_and_nothing_unasked(make: Any) -> None:
    marked = lowered_until(make(toy_weights(2, world_size=2)), "insert_collectives")
    assert not fuse_copies.decide(marked.graph, marked.ctx)
    ctx = replace(marked.ctx, fuses=True)
    edit = fuse_copies.decide(marked.graph, ctx)
    assert edit
    fuse_copies.apply(marked.graph, edit)
    assert not fuse_copies.decide(marked.graph, ctx)


@pytest.mark.parametrize("coalesced", [False, True])
@pytest.mark.parametrize("factor", [None, 3.0])
@pytest.mark.parametrize(("dtype", "replicas"), [(F32, 1), (torch.float16, 1), (F32, 2)])
def test_scaled_gradients_are_the_same(
    dtype: torch.dtype, replicas: int, factor: float | None, coalesced: bool
) -> None:
    if coalesced and replicas > 1:
        pytest.skip("never coalesced: an all-reduce follows")
    weights = toy_weights(1, world_size=2, replicas=replicas, param_dtype=BF16, reduce_dtype=dtype)[:2]
    units = tuple((weight.ref.unit, UnitSettings(divide_factor=factor)) for weight in weights)
    marked = two_reductions(*weights).flagged(units=tuple(dict(units).items()))
    plain = driver.lower(marked.gm, marked.ctx, "test").gm
    graph = fused(marked.coalescing() if coalesced else marked)
    # Of a gradient alone, a cast is one copy, fused or not; with a factor in front of the sum there would be two.
    both = dtype == torch.float16 or factor is not None
    assert len(calls(graph, *FUSED)) == (1 if not coalesced else 2 if both else 0)
    assert not calls(graph, *COPIES)
    ranks = range(2 * replicas)
    inputs = [node.meta["val"] for node in marked.graph.nodes if node.op == "placeholder"]
    args = [
        [torch.randn(v.shape, generator=torch.Generator().manual_seed(rank)).to(v.dtype) for v in inputs]
        for rank in ranks
    ]
    groups = mesh_groups(replicas, 2)
    got, want = (run_ranks(gm, args, groups) for gm in (graph.owning_module, plain))
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
