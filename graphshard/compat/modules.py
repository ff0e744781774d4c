"""What is private of torch about modules: calls past a marked class, and hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module


def module_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`nn.Module.__call__`, hooks included, whatever `module`'s class makes of a call."""
    return nn.Module.__call__(module, *args, **kwargs)


def global_hooks() -> list[int]:
    """Keys of the hooks of all modules."""
    kinds = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
    return [key for kind in kinds for key in getattr(torch_module, f"_global_{kind}")]


def has_only_forward(module: nn.Module) -> bool:
    """Whether `module_call` does nothing but `forward`, where there are no hooks of all modules."""
    return module._compiled_call_impl is None and not any(hooks_of(module))


def hooks_of(module: nn.Module) -> Iterator[tuple[int, Callable[..., Any]]]:
    """(Key, hook) of every forward and backward hook of `module`. Keys are never used twice in a process."""
    forward, backward = module._forward_hooks, module._backward_hooks
    for hooks in (module._forward_pre_hooks, forward, module._backward_pre_hooks, backward):
        yield from hooks.items()
