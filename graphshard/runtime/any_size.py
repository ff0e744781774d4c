"""Programs that a compiler has made for some sizes, and that run for others."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from torch import SymInt, Tensor
from torch.fx import GraphModule

from graphshard.compat.dynamo import boxed_graph
from graphshard.compat.inductor import copy_graph, module_of
from graphshard.graph.ir import aten
from graphshard.state.marked_graph import BoxedCallable

_VIEWS = (aten.view.default, aten._unsafe_view.default)  # noqa: SLF001


def for_any_size(gm: GraphModule) -> Callable[[], BoxedCallable] | None:
    """What makes, once, code that runs a lowered program as it is. None: all of its sizes are numbers."""
    values = (node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder"))
    sizes = (size for value in values for size in (value.shape if isinstance(value, Tensor) else (value,)))
    if not any(isinstance(size, SymInt) for size in sizes):
        return None

    def made() -> BoxedCallable:
        graph = copy_graph(gm)
        for node in graph.nodes:
            if node.target in _VIEWS:  # what a compiled forward has saved may have other strides
                node.target = aten.reshape.default
        return boxed_graph(module_of(gm, graph))

    return cache(made)
