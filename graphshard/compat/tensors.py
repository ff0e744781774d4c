"""What is private of torch about tensors, fake tensors, sizes and operators."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed as BackendCompilerFailed
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental import symbolic_shapes
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

K = TypeVar("K", bound=Hashable)
# Of a tensor: shape, strides, offset; numbers and symbolic expressions.
Sizes: TypeAlias = tuple[tuple[Hashable, ...], tuple[Hashable, ...], Hashable]


def seen_by() -> str | None:
    """What sees each operator of a call now, so that Dynamo would skip its frame or trace it wrongly; None: nothing."""
    if torch._C._len_torch_dispatch_stack() > 0 and not is_selective():
        return "a TorchDispatchMode"  # CommDebugMode, a FLOP counter
    if torch._C._functorch.maybe_current_level() is not None:
        return "a transform of torch.func"
    return None


def is_selective() -> bool:
    """Whether selective checkpoints, and no other modes, see each operator of a call now."""
    modes = map(torch._C._get_dispatch_stack_at, range(torch._C._len_torch_dispatch_stack()))
    found = [isinstance(mode, (_CachingTorchDispatchMode, _CachedTorchDispatchMode)) for mode in modes]
    return bool(found) and all(found)


def unseen() -> AbstractContextManager[object]:
    """Inside, no mode sees operators."""
    return _disable_current_modes()


def address(value: Tensor) -> int:
    """Where a tensor's elements are; of one without elements, where its memory begins."""
    return value.data_ptr() or value.untyped_storage().data_ptr()


def fake_tensors() -> Any:
    """A mode of its own in which tensors have no data."""
    return FakeTensorMode()


def fake_mode_of(value: Tensor) -> Any:
    """The mode that a fake tensor is of."""
    fake: Any = value
    return fake.fake_mode


def is_plain_fake(value: Tensor) -> bool:
    """Whether it is a strided fake tensor, and no wrapper around one."""
    return type(value) is FakeTensor and value.layout is torch.strided


def is_constant(value: object) -> bool:
    """Whether a value of a trace is a number that torch knows, as of `torch.tensor(1.0)`: what is done with such ones,
    torch does at once, not only in the graph.
    """
    return isinstance(value, FakeTensor) and value.constant is not None


def size_key(size: int | torch.SymInt) -> Hashable:
    """Of sizes of one trace, the same for those that are the same number or the same symbolic expression."""
    key: Hashable = size.node.expr if isinstance(size, torch.SymInt) else size
    return key


def is_known(size: object) -> bool:
    """Whether a number of a trace, or its symbolic expression, does not depend on data."""
    symbolic = isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool))
    return not symbolic or not symbolic_shapes.free_unbacked_symbols(size)


def sizes_of(value: Tensor) -> Sizes | None:
    """Shape, strides and offset of a strided fake tensor, as keys; None: they depend on data."""
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    if not all(map(is_known, sizes)):
        return None
    return tuple(map(size_key, value.shape)), tuple(map(size_key, value.stride())), size_key(value.storage_offset())


def empty_of(sizes: Sizes, dtype: torch.dtype, device: torch.device, mode: Any) -> Tensor:
    """A fake tensor of `sizes`, in the fake mode that is active, but for its offset."""

    def size_of(key: Any) -> Any:
        return key if isinstance(key, int) else mode.shape_env.create_symintnode(key, hint=None)

    shape, strides, _ = sizes
    return torch.empty_strided([*map(size_of, shape)], [*map(size_of, strides)], dtype=dtype, device=device)


def no_fake_mode() -> AbstractContextManager[Any]:
    """Inside, new tensors are not made fake."""
    context: AbstractContextManager[Any] = unset_fake_temporarily()
    return context


def moved_tensors(values: Any, device: torch.device) -> Any:
    """`values` with every tensor, in any containers, on `device`. Their memory may be written again behind it: what is
    not pinned is read before the copy begins.
    """

    def moved(value: Tensor) -> Tensor:
        return value if value.device == device else value.to(device, non_blocking=not value.is_pinned())

    return tree_map_only(Tensor, moved, values)


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors in any containers."""
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def version(tensor: Tensor) -> int:
    """How often `tensor` was written in place, through itself or a view of it."""
    return tensor._version


def plain_tensors(value: Any) -> list[Tensor]:
    """The tensors that a tensor is made of: itself, if it wraps none."""
    if is_traceable_wrapper_subclass(value):
        names, _ = value.__tensor_flatten__()
        return [part for name in names for part in plain_tensors(getattr(value, name))]
    return [value] if isinstance(value, Tensor) else []


def mesh_of(value: object) -> DeviceMesh | None:
    """The mesh that a graph gets as an argument; None: the argument is something else."""
    found = getattr(value, "real_obj", value)
    return found if isinstance(found, DeviceMesh) else None


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


def fake_view(value: Any, memory: Tensor, offset: int) -> Tensor:
    """A fake tensor like another one, in memory that there is, from its element `offset` on; under `no_fake_mode`, in a
    tenth of the time of an operator.
    """
    like = torch.empty(0, dtype=value.dtype, device="meta")
    like.set_(memory.untyped_storage(), offset, value.shape, value.stride())
    view: Tensor = type(value)(value.fake_mode, like, value.device)
    return view


def fake_contiguous(value: Any, shape: Sequence[int], is_view: bool) -> Tensor | None:
    """A contiguous fake tensor of the dtype of another one, in no more time than `fake_view`.

    Args:
        value: a fake tensor.
        shape: whose product is the number of its elements; one size may be -1.
        is_view: whether it shares the memory of `value`, else it has its own.

    Returns:
        None: sizes are not numbers, or `value` has no such view.
    """
    sizes = [*value.shape, value.storage_offset(), *shape]
    if not isinstance(value, FakeTensor) or not all(type(size) is int for size in sizes):
        return None
    if is_view and not value.is_contiguous():
        return None
    known = math.prod(size for size in shape if size >= 0)
    if known == 0:
        return None
    shape = [size if size >= 0 else value.numel() // known for size in shape]
    with no_fake_mode():
        like = torch.empty(shape, dtype=value.dtype, device="meta")
        if is_view:
            like.set_(value.untyped_storage(), value.storage_offset(), shape, like.stride())
        found: Tensor = type(value)(value.fake_mode, like, value.device)
    return found
