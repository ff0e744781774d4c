"""What is private of torch about modules: their hooks and tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module


def global_hooks() -> Iterator[tuple[int, Callable[..., Any]]]:
    """(Key, hook) of every hook of all modules."""
    forward, backward = torch_module._global_forward_hooks, torch_module._global_backward_hooks
    for hooks in (torch_module._global_forward_pre_hooks, forward, torch_module._global_backward_pre_hooks, backward):
        yield from hooks.items()


def hooks_of(module: nn.Module) -> Iterator[tuple[int, Callable[..., Any]]]:
    """(Key, hook) of every forward and backward hook of `module`. Keys are never used twice in a process."""
    forward, backward = module._forward_hooks, module._backward_hooks
    for hooks in (module._forward_pre_hooks, forward, module._backward_pre_hooks, backward):
        yield from hooks.items()


def child_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """The table of a module's children, as it stays when they are replaced."""
    return module._modules


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The table of what is registered as a module's own parameters."""
    return module._parameters
