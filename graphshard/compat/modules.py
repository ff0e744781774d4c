"""What is private of torch about modules: their hooks and tables."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Any

from torch import Tensor, nn
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


def kinds_of_hooks(module: nn.Module, others: Container[int]) -> set[str]:
    """What kinds of hooks a module has: ``"forward"``, ``"backward"``.

    Args:
        module: to look at.
        others: keys of hooks that do not count.
    """
    forward = (*module._forward_pre_hooks, *module._forward_hooks)
    backward = (*module._backward_pre_hooks, *module._backward_hooks)
    kinds = {"forward": forward, "backward": backward}
    return {kind for kind, keys in kinds.items() if any(key not in others for key in keys)}


def has_backward_hooks_of_all_modules() -> bool:
    """Whether a backward hook of every module is registered."""
    return bool(torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks)


def hooks_of_parameter(param: Tensor) -> tuple[int, int]:
    """How many hooks a parameter has on its gradient, and behind its accumulation."""
    behind = getattr(param, "_post_accumulate_grad_hooks", None)
    return len(param._backward_hooks or ()), len(behind or ())


def own_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """(Name, buffer, whether a state dict has it) of what is registered as a module's own buffers."""
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield name, buffer, name not in module._non_persistent_buffers_set


def child_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """The table of a module's children, as it stays when they are replaced."""
    return module._modules


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The table of what is registered as a module's own parameters."""
    return module._parameters


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None
