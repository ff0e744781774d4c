"""Captured graphs that run as they are, operator by operator."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from graphshard.errors import ModelDeleted
from graphshard.graph.extensions import EXTENDED
from graphshard.graph.ir import is_call, unshards
from graphshard.reporting.report import ProgramRecord
from graphshard.runtime.model_runtime import ModelRuntime


def is_one_call(gm: GraphModule) -> bool:
    """Whether a captured graph is one call of torch's that reads no parameter, as between two graph breaks: a compiler
    has nothing to fuse there, and calling what it makes takes longer than the operator.
    """
    calls = [node for node in gm.graph.nodes if node.op.startswith("call_")]
    return len(calls) < 2 and not unshards(gm.graph) and not any(gm.children())


def as_it_is(runtime: ModelRuntime, gm: GraphModule) -> Callable[..., Any]:
    """Lets such a graph run, counted as a region of the forward."""
    runtime.context.report.one_calls += 1
    runtime_of = weakref.ref(runtime)

    def run(*args: Any) -> Any:
        if (runtime := runtime_of()) is not None:
            runtime.holdings.forward.regions_run += 1
        return gm.forward(*args)

    return run


def _already_extended(leaf: Tensor, spec: str, full: Tensor, *described: object) -> Tensor:
    return full


def gathering_one_by_one(runtime: ModelRuntime, number: int, gm: GraphModule) -> Callable[..., Any]:
    """Lets a captured graph run as it is; its markers, those of checkpoint regions too, read them one by one.

    They are counted in two records, one run for each gather and each reduction.
    """
    runtime_of = weakref.ref(runtime)
    forward = ProgramRecord(number, "forward", "default", {"all_gather": 1}, 0.0, 0.0)
    backward = ProgramRecord(number, "backward", "default", {"reduce_scatter": 1}, 0.0, 0.0)

    def gather(leaf: Tensor, spec: str, wire: Tensor | None = None) -> Tensor:
        runtime = runtime_of()
        if runtime is None:
            raise ModelDeleted("a gather")
        return runtime.outside.read_in_graph(leaf, forward, backward)

    for graph_module in gm.modules():
        if isinstance(graph_module, GraphModule) and (markers := unshards(graph_module.graph)):
            for marker in markers:
                marker.target = gather
                for user in marker.users:
                    if is_call(user, EXTENDED):  # what is read is as modules see it
                        user.target = _already_extended
            graph_module.recompile()
            if forward not in runtime.context.report.programs:
                runtime.context.report.programs += [forward, backward]
    return gm
