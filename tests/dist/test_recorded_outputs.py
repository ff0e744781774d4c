"""Hooks that transformers registers in the first forward that records outputs break the graph of none."""

from __future__ import annotations

import sys
from threading import Lock
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import models
import torch
from torch import Tensor, nn

import graphshard
from graphshard.testing import TrainingRun, training_test

_lock = Lock()


def maybe_install_capturing_hooks(module: Any) -> None:
    """As in transformers."""
    if not getattr(module, "has_hooks", False):
        with _lock:
            for layer in module.layers:
                layer.register_forward_hook(lambda _layer, _args, output: module.recorded.append(output))
            module.has_hooks = True


class Recording(nn.Module):
    """Returns what its layers have, if that is asked for, as a mixture of experts does for its auxiliary loss."""

    _can_record_outputs: ClassVar = {"router_logits": nn.Linear}

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(output_router_logits=True)
        self.layers = nn.ModuleList(nn.Linear(models.DIM, models.DIM) for _ in range(3))
        self.recorded: list[Tensor] = []

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        self.recorded = []
        maybe_install_capturing_hooks(self)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x, *self.recorded


@training_test()
def test_hooks_of_recorded_outputs_are_there_before_the_first_forward(run: TrainingRun) -> None:
    library = ModuleType("transformers.utils.output_capturing")
    vars(library)["maybe_install_capturing_hooks"] = maybe_install_capturing_hooks
    torch.manual_seed(0)
    model: Any = run.shard(Recording(), units=[nn.Linear])
    with mock.patch.dict(sys.modules, {library.__name__: library}):
        for step in range(2):
            outputs = model(models.features(step, run.rank)[0][run.rank :])
            assert len(outputs) == 4
            loss = sum(output.square().mean() for output in outputs)
            loss.backward()
            run.observe(loss, model)
    assert run.is_reference or graphshard.report(model).regions == 1
