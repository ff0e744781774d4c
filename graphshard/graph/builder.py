"""Adds nodes to a graph, each with its fake value."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from graphshard.compat.tensors import fake_contiguous
from graphshard.graph.ir import aten, fake, val


class Builder:
    """Adds nodes before one node, with the fake value of each.

    Args:
        graph: the graph to change.
        anchor: new nodes go before it.
        meta: put into the meta of every new node.
    """

    def __init__(self, graph: Graph, anchor: Node, **meta: Any) -> None:
        self._graph = graph
        self.anchor = anchor
        self.meta = meta

    def call(self, target: Callable[..., Any], *args: Any, **meta: Any) -> Node:
        """Adds `target(*args)`; `meta` goes into the node's."""
        return self.call_with(target, args, {}, **meta)

    def call_with(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], **meta: Any) -> Node:
        """Adds `target(*args, **kwargs)`; `meta` goes into the node's."""
        fake_args = fake(args)
        if target is operator.getitem:
            return self._add(fake_args[0][fake_args[1]], target, args, kwargs, **meta)
        mode = next((x.fake_mode for x in _tensors(fake_args) if hasattr(x, "fake_mode")), None)
        if mode is None:
            raise AssertionError(f"{target}: no argument has a fake value")
        with mode, torch.no_grad():
            value = target(*fake_args, **kwargs)
        return self._add(value, target, args, kwargs, **meta)

    def _add(
        self, value: Any, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], **meta: Any
    ) -> Node:
        with self._graph.inserting_before(self.anchor):
            node = self._graph.call_function(target, args, kwargs)
        node.meta.update(self.meta, val=value, **meta)
        return node

    def contiguous_copy(self, node: Node) -> Node:
        """A fresh copy of `node` with contiguous strides."""
        target, args, kwargs = aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
        if (value := fake_contiguous(val(node), val(node).shape, is_view=False)) is None:
            return self.call_with(target, args, kwargs)
        return self._add(value, target, args, kwargs)

    def cast(self, node: Any, dtype: torch.dtype) -> Node:
        """`node` in `dtype`; itself where it has it."""
        return (
            node if val(node).dtype == dtype else self.call(torch.ops.prims.convert_element_type.default, node, dtype)
        )

    def reshape(self, node: Node, shape: Sequence[int]) -> Node:
        """`node` in `shape` (one dim may be -1); itself where it has it."""
        if tuple(val(node).shape) == tuple(shape):
            return node
        if (value := fake_contiguous(val(node), shape, is_view=True)) is None:
            return self.call(aten.reshape.default, node, list(shape))
        return self._add(value, aten.reshape.default, (node, list(shape)), {})


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
