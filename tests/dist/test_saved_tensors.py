"""Hooks of saved tensors that hand back copies, as those that offload or compress activations do."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import models
import pytest
import torch
from test_training import BITWISE
from torch import Tensor, nn

from graphshard.testing import TrainingRun, training_test


def copying(wanted: bool) -> AbstractContextManager[Any]:
    if not wanted:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.clone(), lambda copy: copy)


class CopiesInSome(nn.Module):
    def __init__(self, layers: nn.Sequential, copies: bool) -> None:
        super().__init__()
        self.layers, self.copies = layers, copies

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            with copying(self.copies and number % 2 == 1):
                x = layer(x)
        return x


@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["all ranks", "one rank"])
@pytest.mark.parametrize("where", ["the call", "some blocks"])
@training_test(tolerance=BITWISE, allow_eager=("",))
def test_copies_of_what_was_saved(run: TrainingRun, where: str, ranks: tuple[int, ...]) -> None:
    copies = run.rank in ranks
    model: Any = run.shard(CopiesInSome(models.mlps(4), copies and where == "some blocks"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(3):
        with copying(copies and where == "the call"):
            loss = model(*models.features(index, run.rank)).square().mean()
        loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()
