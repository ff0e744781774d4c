"""A block that is traced by itself enters what is in effect around its operators, and leaves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._functorch import maybe_current_level
from torch.fx import Graph, GraphModule
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphshard.compat.block_trace import trace_apart
from graphshard.compat.dynamo import AttentionKernels
from graphshard.compat.inductor import compile_region_aot
from graphshard.graph.equal_blocks import find_blocks

DIM, LAYERS = 8, 6


class Naming(nn.Module):
    """Fewer values go from one operator to the next where kernels of attention are named than where they are not."""

    def __init__(self, sets_priority: bool) -> None:
        super().__init__()
        self.sets_priority = sets_priority
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            with sdpa_kernel([SDPBackend.MATH], set_priority=self.sets_priority):
                x = layer(x + y)
                x = layer(x)
                y = x.sin()
            x = x.cos()
        return x * y


def captured(model: Callable[..., Any], *args: Tensor) -> Graph:
    found: list[GraphModule] = []

    def keep(gm: GraphModule, _: Any) -> Any:
        found.append(gm)
        return gm

    torch._dynamo.reset()
    torch.compile(model, backend=keep, fullgraph=True)(*args)
    return found[0].graph


def test_no_block_ends_where_kernels_of_attention_are_named() -> None:
    for sets_priority in (False, True):
        (blocks,) = find_blocks(captured(Naming(sets_priority), torch.randn(2, DIM)), {})
        assert len(blocks) >= LAYERS - 1
        around = AttentionKernels.now()
        for block in blocks:
            kernels, seen = around, []
            for node in block.nodes:
                if (others := kernels.behind(node)) is not None:
                    kernels = others
                    seen.append(kernels)
            assert [found == around for found in seen] == [False, True]


def test_kernels_of_attention_are_read_off_a_graph_as_they_are_set() -> None:
    seen = []

    def attend(x: Tensor) -> Tensor:
        with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
            x = x.sin()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return x.cos()

    kernels = around = AttentionKernels.now()
    for node in captured(attend, torch.randn(2)).nodes:
        if (others := kernels.behind(node)) is not None:
            kernels = others
            seen.append(kernels)
    expected = []
    for names, sets_priority in (
        ([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], True),
        ([SDPBackend.FLASH_ATTENTION], False),
    ):
        with sdpa_kernel(names, set_priority=sets_priority):
            expected.append(AttentionKernels.now())
        expected.append(around)
    assert seen == expected


def fails() -> None:
    raise ValueError("a part that cannot be traced")


def test_a_block_that_cannot_be_traced_leaves_what_it_has_entered() -> None:
    def work(x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH), torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            return torch.vmap(torch.sin)(x)

    graph = captured(work, torch.randn(3, 2))
    end = next(node for node in graph.nodes if "_vmap_decrement_nesting" in str(node.target))
    with graph.inserting_before(end):
        graph.call_function(fails)
    values = [node.meta["example_value"] for node in graph.find_nodes(op="placeholder")]

    def in_effect() -> tuple[Any, ...]:
        autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        return AttentionKernels.now(), autocast, torch.is_grad_enabled(), maybe_current_level()

    before = in_effect()
    with pytest.raises(ValueError, match="cannot be traced"):
        trace_apart(GraphModule({}, graph), values, compile_region_aot)
    assert in_effect() == before
