"""Hooks that transformers registers in the first forward that records outputs break the graph of none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from threading import Lock
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, ClassVar

import models
import pytest
import torch
from torch import Tensor, nn

import graphshard
from graphshard.testing import TrainingRun, training_test

LIBRARY = "transformers.utils.output_capturing"
_lock = Lock()


def install(module: Any) -> None:
    """As in transformers: hooks of what is inside once more, whether it has them or not."""
    for child in module.children():
        if hasattr(child, "_can_record_outputs"):
            install(child)
    for layer in getattr(module, "layers", ()):
        layer.register_forward_hook(lambda _layer, _args, output: module.recorded.append(output))
    module.has_hooks = True


def maybe_install_capturing_hooks(module: Any) -> None:
    """As in transformers."""
    if not getattr(module, "has_hooks", False):
        with _lock:
            install(module)


def capturing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """What transformers wraps the forward of what records in."""

    def wrapper(self: Any, *args: Any) -> Any:
        self.recorded = []
        if self.config.output_router_logits or args[1:]:
            maybe_install_capturing_hooks(self)
        return forward(self, args[0]), *self.recorded

    return of_library(wrapper, forward)


def select_hidden_states(method: Callable[..., Any]) -> Callable[..., Any]:
    """What transformers wraps a method in that asks a part for what it records."""

    def wrapper(self: Any, *args: Any) -> Any:
        return method(self, *args, True)

    return of_library(wrapper, method)


def of_library(wrapper: Any, wrapped: Callable[..., Any]) -> Callable[..., Any]:
    own = FunctionType(wrapper.__code__, {**globals(), "__name__": LIBRARY}, closure=wrapper.__closure__)
    return wraps(wrapped)(own)


class Asked(nn.Module):
    _can_record_outputs: ClassVar = {"router_logits": nn.Linear}

    def __init__(self, by_config: bool = True) -> None:
        super().__init__()
        self.config = SimpleNamespace(output_router_logits=by_config)


class Recording(Asked):
    """Returns what its layers have, too, as a mixture of experts does for its auxiliary loss."""

    def __init__(self, by_config: bool = True) -> None:
        super().__init__(by_config)
        self.layers = nn.ModuleList(nn.Linear(models.DIM, models.DIM) for _ in range(3))
        self.recorded: list[Tensor] = []

    @capturing
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Headed(Asked):
    """Records nothing itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Recording(), nn.Linear(models.DIM, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        out, *recorded = self.body(x)
        return self.head(out), *recorded


class Seeing(nn.Module):
    """Asks one of two parts for what it records, as a language model its vision tower."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.text, self.head = Recording(False), Recording(False), nn.Linear(models.DIM, 3)

    @select_hidden_states
    def features(self, x: Tensor, *asked: bool) -> list[Tensor]:
        return list(self.tower(x, *asked))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        out, *recorded = self.features(x)
        (read,) = self.text(out)
        return self.head(read), *recorded


@pytest.mark.parametrize("made", [Headed, Seeing])
@training_test()
def test_hooks_of_recorded_outputs_are_there_before_the_first_forward(
    run: TrainingRun, made: Callable[[], nn.Module]
) -> None:
    library = ModuleType(LIBRARY)
    vars(library)["maybe_install_capturing_hooks"] = maybe_install_capturing_hooks
    torch.manual_seed(0)
    sys.modules[LIBRARY] = library
    try:
        for has_run in (False, True):
            built = made()
            if has_run:
                built(torch.randn(2, models.DIM))
            model: Any = run.shard(built, units=[nn.Linear])
            for step in range(2):
                outputs = model(models.features(step, run.rank)[0][run.rank :])
                assert len(outputs) == 4
                loss = sum(output.square().mean() for output in outputs)
                loss.backward()
                run.observe(loss, model)
            assert run.is_reference or graphshard.report(model).regions == 1
    finally:
        del sys.modules[LIBRARY]
