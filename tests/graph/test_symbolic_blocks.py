"""Equal blocks whose sizes are symbols, and what keeps such ones from being traced once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import traced_model
from test_traced_blocks import BATCH, DIM, Stack, plain, scaled
from torch import Tensor, nn
from traced_model import Traced


def compared(model: nn.Module) -> Traced:
    """A model that was captured with symbols; its results and gradients are those of eager, of other sizes too."""
    traced = Traced(model, None)
    for batch in (BATCH, BATCH + 2):
        found = []
        for run in (traced.run, model):
            x = torch.linspace(-1, 1, batch * DIM).view(batch, DIM).requires_grad_()
            torch._dynamo.mark_dynamic(x, 0)
            model.zero_grad()
            result = run(x)
            result.square().sum().backward()
            found.append([result, x.grad, *(param.grad for param in model.parameters())])
        assert all(map(torch.equal, *found))
    return traced


@pytest.mark.parametrize("step", [plain, scaled])
def test_a_size_is_one_node_in_each_graph(step: Any) -> None:
    traced = compared(Stack(step, layers=8))
    assert traced.calls >= 7
    for gm in traced.graphs.values():
        nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
        sizes = [str(node.meta["val"]) for node in nodes if isinstance(node.meta.get("val"), torch.SymInt)]
        assert len(sizes) == len(set(sizes)), sizes


def test_blocks_may_read_a_size_that_is_computed_outside() -> None:
    class Counted(Stack):
        def forward(self, x: Tensor) -> Any:
            number = 2 * x.shape[0] + 1
            for layer in self.layers:
                x = layer(x) / number
            return x

    assert compared(Counted(plain)).calls == 6


def test_blocks_that_read_a_size_of_none_of_their_inputs_are_traced_one_by_one() -> None:
    class Other(Stack):
        def forward(self, x: Tensor) -> Any:
            rows = x[1:].sum(1)
            x = x.new_ones(2, DIM) * x.sum()
            for layer in self.layers:
                x = layer(x) / rows.shape[0]
            return x

    traced = compared(Other(plain))
    said = "equal blocks are traced one by one: they read or yield sizes that none of their inputs has (dynamic shapes)"
    assert traced.calls == 0 and traced.report.notes == [said]


def test_sizes_may_depend_on_values() -> None:
    class Picked(Stack):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x[x[:, 0] > -0.5])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compared(Picked(plain))


def test_blocks_are_traced_one_by_one_where_one_alone_cannot_be_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> Any:
        raise RuntimeError("torch does not like it\nmore")

    monkeypatch.setattr(traced_model, "trace_apart", fails)
    traced = compared(Stack(plain))
    assert traced.report.notes == [
        "equal blocks are traced one by one: one of them cannot be traced alone: RuntimeError: torch does not like it"
    ]
