"""What Dynamo is asked of while it traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from graphshard.compat import running_trace
from graphshard.compat.running_trace import failed_guard


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.times, self.settings = 2, {"kind": "none yet"}

    def forward(self, x: Tensor) -> Tensor:
        if self.settings["kind"] == "none yet":
            self.settings["kind"] = "chosen"
        return x * self.times


def wider(model: Scaled) -> Tensor:
    return torch.ones(5)


def thrice(model: Scaled) -> Tensor:
    model.times = 3
    return torch.ones(4)


def as_it_left_it(model: Scaled) -> Tensor:
    return torch.ones(4)


@pytest.mark.parametrize(
    ("change", "guard", "has_code"),
    [
        (wider, "tensor 'x' size mismatch at index 0. expected 4, actual 5", False),
        (thrice, "self.times == 2", True),
        (as_it_left_it, "self.settings['kind'] == 'none yet'", True),
    ],
)
def test_guard_that_failed_is_named_with_where_its_code_stands(
    change: Callable[[Scaled], Tensor], guard: str, has_code: bool
) -> None:
    torch.compiler.reset()
    told: list[str] = []

    def backend(gm: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., object]:
        told.append(failed_guard())
        return gm

    model = Scaled()
    if change is not as_it_left_it:
        model.settings["kind"] = "chosen"
    model.compile(backend=backend)
    model(torch.ones(4))
    model(change(model))
    first, second = told
    assert first == ""
    assert second.startswith(guard)
    assert ("test_running_trace.py" in second) == has_code
    assert "HINT" not in second and "\n" not in second


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (
            "3/1: tensor 'module._modules['blocks']._modules['1'].__dict__['_graphshard_shard_bias'][0]' requires_grad "
            "mismatch. expected requires_grad=1  # graphshard/capture/unit_inputs.py:26 in entering",
            "tensor 'module.blocks.1.bias' requires_grad mismatch. expected requires_grad=1",
        ),
        (
            "0/0: args[1] == 2.0  # return x * args[1]  # train.py:7 in forward",
            "args[1] == 2.0 (train.py:7 in forward)",
        ),
    ],
)
def test_guard_that_failed_is_named_in_the_users_words(told: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = SimpleNamespace(_metrics={"recompile_reason": told})
    monkeypatch.setattr(running_trace, "get_metrics_context", lambda: metrics)
    assert failed_guard() == said
