"""What is private of torch about tensors, fake tensors, sizes and operators."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed as BackendCompilerFailed
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import symbolic_shapes
from torch.utils._pytree import tree_map_only


def dispatch_mode_active() -> bool:
    """Whether a TorchDispatchMode (CommDebugMode, a FLOP counter) is on: Dynamo would skip the frame for good."""
    return torch._C._len_torch_dispatch_stack() > 0


def fake_tensors() -> Any:
    """A mode of its own in which tensors have no data."""
    return FakeTensorMode()


def moved_tensors(values: Any, device: torch.device) -> Any:
    """`values` with every tensor, in any containers, on `device`."""

    def moved(value: Tensor) -> Tensor:
        return value if value.device.type == device.type else value.to(device, non_blocking=True)

    return tree_map_only(Tensor, moved, values)


def version(tensor: Tensor) -> int:
    """How often `tensor` was written in place, through itself or a view of it."""
    return tensor._version


def keep_static(tensor: Tensor) -> None:
    """Tells Dynamo never to make a dim of `tensor` symbolic."""
    torch._dynamo.mark_static(tensor)


def is_torch_operator(target: object) -> TypeGuard[Any]:
    """Whether the target of a node is an operator with a schema."""
    return isinstance(target, torch._ops.OpOverload)


def size_hint(size: int | torch.SymInt, fallback: int) -> int:
    """The number that a symbolic size had when it was traced, without a guard; `fallback` where it depends on data."""
    if not isinstance(size, torch.SymInt):
        return size
    hint = getattr(symbolic_shapes, "optimization_hint", None)
    if hint is not None:
        return int(hint(size, fallback=fallback))
    return int(size.node.hint) if size.node.has_hint() else fallback
