"""Runs a graph that Dynamo captured, and its backward, for all ranks of a world.

One autograd node gathers a parameter for all ranks, and reduces all of their gradients: so backward is in lock step,
too. As in eager FSDP2 there is one gathered parameter in a forward, whose gradient is reduced once, however often it is
read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from graphshard.graph.extensions import EXTENDED
from graphshard.graph.ir import is_call, spec_of
from graphshard.validation.inputs import Drawing, value_of
from graphshard.validation.lockstep import LockStep
from graphshard.validation.markers import Reductions, Values, gathered
from graphshard.validation.unchecked import Unchecked


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, node: Node, reductions: Reductions, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.node, ctx.reductions = node, reductions
        ctx.save_for_backward(*shards)
        return tuple(full.clone() for full in gathered(shards, spec_of(node), reductions.world))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *ctx.reductions.reduced(ctx.node, list(grads), list(ctx.saved_tensors))


@dataclass(frozen=True)
class Captured:
    """Runs captured graphs.

    Attributes:
        reductions: how gradients are reduced.
        blocks: what calls of blocks stand for.
    """

    reductions: Reductions
    blocks: Mapping[str, GraphModule]

    def run(self, graph: Graph, inputs: list[Values]) -> list[Values]:
        """The results of a graph on every rank, then the gradients of those inputs that need one."""
        if any(is_call(node, EXTENDED) for node in graph.nodes):
            raise Unchecked("a tensor subclass gathers in its own way, which its graph does not say yet")
        full: dict[object, Values] = {}

        def gather(node: Node, shards: Values, wires: Values | None) -> Values:
            key = (node.args[1], *map(id, shards))  # a block has other shards in each call
            if key not in full:
                with torch.enable_grad():
                    full[key] = list(_Gather.apply(node, self.reductions, *shards))  # type: ignore[no-untyped-call]
            return full[key]

        before = torch.is_grad_enabled()
        try:
            with torch.enable_grad():
                results = LockStep(self.reductions, gather, self.blocks).run(graph, inputs)
        finally:
            torch.set_grad_enabled(before)
        return [*results, *self._grads(results, inputs)]

    def _grads(self, results: list[list[Any]], inputs: list[list[Any]]) -> list[Values]:
        losses = {id(one): one for values in results for one in values if isinstance(one, Tensor) and one.requires_grad}
        asked = [values for values in inputs if isinstance(values[0], Tensor) and values[0].requires_grad]
        wanted = {id(one): one for values in asked for one in values}
        if not losses or not wanted:
            return []
        weights = [_weights(one) for one in losses.values()]
        found = torch.autograd.grad([*losses.values()], [*wanted.values()], weights, allow_unused=True)
        by_input = dict(zip(wanted, found, strict=True))
        return [[by_input[id(one)] for one in values] for values in asked]


def _weights(result: Tensor) -> Tensor:
    """The gradient of a result: as unlike as its elements are."""
    count = torch.arange(result.numel(), device=result.device).reshape(result.shape)
    return ((count % 7 - 2) / 4).to(result.dtype)


def captured_inputs(graph: Graph, drawing: Drawing) -> list[Values]:
    """Inputs of a captured graph: those that need a gradient say so, and each rank has its own, to write."""
    found = []
    for node in graph.find_nodes(op="placeholder"):
        like = value_of(node)
        if like is None:
            raise Unchecked(f"%{node.name} has no value to be like")
        values = drawing.of(node.name, like)
        if isinstance(like, Tensor):
            values = [value.clone().requires_grad_(like.requires_grad) for value in values]
        found.append(values)
    return found
