"""What a node reads and writes, and what its result costs nothing: views, metadata, collectives and markers."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from graphshard.compat.tensors import size_hint

aten = torch.ops.aten

# A size that depends on data counts as this many. Source: Inductor's own fallback for such sizes.
UNBACKED_SIZE = 8192

# Collectives are costed apart, markers become collectives.
_FREE_NAMESPACES = frozenset({"graphshard", "_c10d_functional", "_c10d_functional_autograd", "c10d"})
# They return a view (reshape where it can), or memory that nobody wrote, but their schema does not say so.
_FREE = frozenset(
    {
        operator.getitem,
        aten.reshape.default,
        aten._unsafe_view.default,  # noqa: SLF001
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
        aten.lift_fresh.default,
    }
)
_VIEWS = frozenset({operator.getitem, aten.reshape.default, aten._unsafe_view.default, aten.lift_fresh.default})  # noqa: SLF001
_CAST = torch.ops.prims.convert_element_type.default
# Of their first tensor they read what they yield, not all of it.
_GATHERS = frozenset(
    {aten.embedding, aten.index, aten.index_select, aten.gather, aten.slice_copy, aten.select_copy, aten.take}
)


def is_view(node: Node) -> bool:
    """Whether the result of `node` is memory of an argument, unchanged."""
    if node.op != "call_function":
        return False
    if _makes_views(node.target):
        return True
    # A cast to the dtype that is there already: Inductor drops it.
    source = node.args[0] if node.target is _CAST else None
    return isinstance(source, Node) and source.meta["val"].dtype == node.meta["val"].dtype


def is_free(node: Node) -> bool:
    """Whether `node` runs no kernel of its own."""
    if node.op != "call_function" or _computes_nothing(node.target) or is_view(node):
        return True
    return not any(True for _ in tensors(node.meta.get("val"))) and not is_mutation(node)


def is_mutation(node: Node) -> bool:
    """Whether `node` writes into an argument."""
    return _writes(node.target)


# The planner asks for each node several times.
@lru_cache(maxsize=4096)
def _makes_views(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    infos = [result.alias_info for result in schema.returns] if schema else []
    return target in _VIEWS or any(alias is not None and not alias.is_write for alias in infos)


@lru_cache(maxsize=4096)
def _computes_nothing(target: Any) -> bool:
    namespace = getattr(target, "namespace", "")  # plain Python, arithmetic of sizes, has none
    return target in _FREE or not namespace or namespace in _FREE_NAMESPACES


@lru_cache(maxsize=4096)
def _writes(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape that `tensor` had when it was traced."""
    return tuple(size_hint(size, UNBACKED_SIZE) for size in tensor.shape)


def num_bytes(tensor: Tensor) -> int:
    """Bytes of the elements of `tensor`; what a broadcast repeats counts once."""
    if tensor.layout != torch.strided:
        return math.prod(shape(tensor)) * tensor.dtype.itemsize
    strides, numel = tensor.stride(), tensor.numel()
    if type(numel) is int and all(type(stride) is int and stride for stride in strides):
        return numel * tensor.dtype.itemsize
    sizes = (size for size, stride in zip(shape(tensor), strides, strict=True) if type(stride) is not int or stride)
    return math.prod(sizes) * tensor.dtype.itemsize


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in `value`, in any lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def read_bytes(node: Node, source: Node) -> int:
    """Bytes of `source` that `node` reads."""
    if is_call_of_copy(node) and source is node.args[0] and source not in node.args[1:]:
        return 0
    own = sum(num_bytes(tensor) for tensor in tensors(source.meta.get("val")))
    if getattr(node.target, "overloadpacket", None) in _GATHERS and source is node.args[0]:
        return min(own, sum(num_bytes(tensor) for tensor in tensors(node.meta.get("val"))))
    return own


def is_call_of_copy(node: Node) -> bool:
    """Whether `node` overwrites its first argument without reading it."""
    return node.target in (aten.copy_.default, aten.fill_.Scalar, aten.zero_.default)
