"""Code that runs a lowered program as it is, operator by operator."""

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


def plain_code(gm: GraphModule) -> BoxedCallable:
    """Runs a program for any size, with values of any strides: those that tracing foresees are not always those that
    operators give (softplus's gradient), nor those that a compiled forward has saved.
    """
    graph = copy_graph(gm)
    for node in graph.nodes:
        if node.target in _VIEWS:
            node.target = aten.reshape.default
    return boxed_graph(module_of(gm, graph))


def for_any_size(gm: GraphModule) -> Callable[[], BoxedCallable] | None:
    """What makes, once, such code of a program that is compiled for some sizes. None: all of its sizes are numbers."""
    values = (node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder"))
    sizes = (size for value in values for size in (value.shape if isinstance(value, Tensor) else (value,)))
    if not any(isinstance(size, SymInt) for size in sizes):
        return None
    return cache(lambda: plain_code(gm))
