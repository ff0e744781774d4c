"""A model as Dynamo captures it, its equal blocks traced once, and the graphs that are made of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from graphshard.compat.block_trace import trace_apart
from graphshard.compat.dynamo import boxed, boxed_graph
from graphshard.compat.inductor import compile_region_aot
from graphshard.compat.partitioner import CustomPartitionerFn, partition
from graphshard.compat.tensors import size_hint
from graphshard.graph.block_calls import Body, call_block
from graphshard.graph.ir import is_tangent, output_args
from graphshard.lowering import driver
from graphshard.lowering.traced_blocks import compile_traced_once
from graphshard.reporting.report import Report


class Traced:
    """A model whose captured graph was compiled: its graphs by their directions, and what was said."""

    def __init__(self, model: Callable[..., Any], dynamic: bool | None = False) -> None:
        self.graphs: dict[str, GraphModule] = {}
        self._bodies: Sequence[Body] = ()
        self.report = Report()
        self.calls = 0
        torch._dynamo.reset()
        self.run: Callable[..., Any] = torch.compile(model, backend=self._backend, fullgraph=True, dynamic=dynamic)

    def _backend(self, gm: GraphModule, inputs: Sequence[Any]) -> Any:
        def compile_it(bodies: Sequence[Body]) -> Any:
            self.calls = sum(node.target is call_block for node in gm.graph.nodes)
            self._bodies = bodies
            return compile_region_aot(gm, inputs, self._compile, _Partitioner())

        def trace(part: GraphModule, values: Sequence[Tensor]) -> Any:
            return trace_apart(part, values, compile_region_aot)

        return compile_traced_once(gm, trace, compile_it, self.report, "a", {})

    def _compile(self, gm: GraphModule, inputs: Sequence[Any], direction: str) -> Any:
        driver.expand(gm, "a")
        self.graphs[direction] = gm
        run = boxed_graph(gm)
        return boxed(lambda args: run(args))

    def saved_bytes(self) -> int:
        """Of what forward makes for backward."""
        taken = self.graphs["backward"].graph.find_nodes(op="placeholder")
        count = sum(not is_tangent(node) for node in taken)
        saved = dict.fromkeys(output_args(self.graphs["forward"].graph)[-count:])
        values = [node.meta["val"] for node in saved if node.op != "placeholder"]
        # Not the states of random numbers, whose sizes are symbols.
        tensors = [value for value in values if isinstance(value, Tensor) and value.dtype != torch.uint8]
        return sum(math.prod(size_hint(size, 0) for size in value.shape) * value.itemsize for value in tensors)

    def lines(self, direction: str) -> list[str]:
        """Operators with the kinds of their arguments and results, in any order."""
        gm = self.graphs[direction]
        lines = []
        for node in gm.graph.nodes:
            args = torch.fx.node.map_arg(node.args, lambda read: str(read.meta["val"]))
            lines.append(f"{node.target if node.op == 'call_function' else node.op} {args} {node.meta.get('val')}")
        return sorted(lines)


class _Partitioner(CustomPartitionerFn):
    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        driver.run_joint_passes(gm)
        return partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        return "test"
