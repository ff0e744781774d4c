"""Traces a part of a captured graph by itself, with the compiler's own front end, as far as its joint graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import GraphModule

from graphshard.compat.dynamo import modes_kept
from graphshard.compat.inductor import GraphCompiler

CompileRegion = Callable[[GraphModule, Sequence[Any], GraphCompiler, CustomPartitionerFn], Callable[..., Any]]


@dataclass(frozen=True)
class Trace:
    """What the front end made of a graph.

    Attributes:
        gm: joint graph, or where no gradient is asked for the graph for inference.
        is_joint: which of them.
    """

    gm: GraphModule
    is_joint: bool


class _Traced(Exception):
    def __init__(self, trace: Trace) -> None:
        super().__init__("a part was traced")
        self.trace = trace


class _Stop(CustomPartitionerFn):
    """Ends the compilation where the joint graph would be split."""

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> NoReturn:
        raise _Traced(Trace(gm, True))

    def uuid(self) -> str:
        return "graphshard-part"


def trace_apart(gm: GraphModule, values: Sequence[Tensor], compile_region: CompileRegion) -> Trace:
    """Traces `gm` as `compile_region` does.

    Args:
        gm: part of a graph of Dynamo's.
        compile_region: traces what it compiles; it is stopped there.
        values: fake values of its arguments; new ones of the same kind are made.
    """
    fake_mode: Any = detect_fake_mode(values)
    with fake_mode:
        inputs = [
            torch.empty_strided(
                value.shape,
                value.stride(),
                dtype=value.dtype,
                device=value.device,
                requires_grad=value.requires_grad,
            )
            for value in values
        ]
    with tracing(TracingContext(fake_mode)), modes_kept():
        try:
            compile_region(gm, inputs, _stop, _Stop())
        except Exception as error:
            if (traced := _traced(error)) is None:
                raise
            return traced.trace
    raise AssertionError("the front end did not come to the graph of a part")


def _stop(gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> NoReturn:
    raise _Traced(Trace(gm, False))


def _traced(error: BaseException | None) -> _Traced | None:
    """The compiler may have put the end of the trace behind an error of its own."""
    while error is not None and not isinstance(error, _Traced):
        error = error.__cause__ or error.__context__
    return error
