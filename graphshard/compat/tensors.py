"""What is private of torch about tensors, fake tensors, sizes and operators."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed as BackendCompilerFailed
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental import symbolic_shapes
from torch.utils._pytree import tree_map_only

K = TypeVar("K", bound=Hashable)


def dispatch_mode_active() -> bool:
    """Whether a TorchDispatchMode (CommDebugMode, a FLOP counter) is on: Dynamo would skip the frame for good."""
    return torch._C._len_torch_dispatch_stack() > 0


def fake_tensors() -> Any:
    """A mode of its own in which tensors have no data."""
    return FakeTensorMode()


def no_fake_mode() -> AbstractContextManager[Any]:
    """Inside, new tensors are not made fake."""
    context: AbstractContextManager[Any] = unset_fake_temporarily()
    return context


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


def fake_copy(value: Any, memory: dict[K, Tensor], key: K) -> Tensor:
    """A fake tensor like another one, in memory of its own; under `no_fake_mode` in a tenth of the time of an operator.

    Args:
        value: a fake tensor whose sizes are numbers.
        memory: of earlier copies, by key; one is added.
        key: the same for tensors that share memory.
    """
    if (base := memory.get(key)) is None:
        nbytes = value.untyped_storage().nbytes()
        base = memory[key] = torch.empty(nbytes, dtype=torch.uint8, device="meta")
    like = torch.empty(0, dtype=value.dtype, device="meta")
    like.set_(base.untyped_storage(), value.storage_offset(), value.shape, value.stride())
    copy: Tensor = type(value)(value.fake_mode, like, value.device)
    return copy
