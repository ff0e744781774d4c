"""Fake values for copied nodes."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphshard.compat.tensors import fake_view


class FakeValues:
    """Fake values for the nodes of one copy of a body. What views a value from outside has one of its own. All else has
    that of the body, so that all copies share it: one of its own would take 90 us for each node.
    """

    def __init__(self) -> None:
        self._bound: dict[StorageWeakRef, tuple[Tensor, int]] = {}  # and where the body's memory begins in it

    def bind(self, body: Tensor, outside: Tensor) -> None:
        """`outside` is in the copy what `body` is in the body."""
        self._bound[_memory_of(body)] = outside, int(outside.storage_offset() - body.storage_offset())

    def copied(self, value: Any) -> Any:
        """The value of a copied node."""
        if isinstance(value, (tuple, list)):
            return type(value)(map(self.copied, value))
        if not isinstance(value, Tensor) or (bound := self._bound.get(_memory_of(value))) is None:
            return value
        outside, begin = bound
        if outside.dtype != value.dtype or not all(isinstance(size, int) for size in (*value.shape, *value.stride())):
            return value
        return fake_view(value, outside, int(value.storage_offset()) + begin)


def _memory_of(value: Tensor) -> StorageWeakRef:
    return StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]
