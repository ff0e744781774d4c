"""The first run of a forward, which AOTAutograd makes under its check of what users' operators return."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import models
import pytest
import torch
from torch import Tensor, nn
from torch._functorch._aot_autograd import runtime_wrappers
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.testing import WorkerPool

CHECK = getattr(runtime_wrappers, "_AnalyzeCustomOpInputOutputMode", None)


@torch.library.custom_op("graphshard_first_run_test::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, grad: 2 * grad)


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = models.Decoder(layers=2)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = doubled(self.layers(x))
        return hidden


def seen_by_the_check(has_own: bool) -> set[str]:
    """Namespaces of the operators that it sees in a step."""
    seen = set[str]()
    assert CHECK is not None
    real = CHECK.__torch_dispatch__

    def see(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.add(func.namespace)
        return real(self, func, types, args, kwargs)

    model: Any = Doubling() if has_own else models.Decoder(layers=2)
    graphshard.compile(model, init_device_mesh("cpu", (2,)), backend="aot_eager")
    with patch.object(CHECK, "__torch_dispatch__", see):
        model(*models.tokens(0, torch.distributed.get_rank())).square().mean().backward()
    return seen


@pytest.mark.skipif(CHECK is None, reason="this torch has no such check")
@pytest.mark.parametrize("has_own", [False, True])
def test_the_check_sees_users_operators_and_no_program_without_one(two_ranks: WorkerPool, has_own: bool) -> None:
    for seen in two_ranks.run(seen_by_the_check, has_own):
        assert ("_c10d_functional" in seen) == ("graphshard_first_run_test" in seen) == has_own
