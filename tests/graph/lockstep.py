"""Runs a lowered graph for all ranks in one process: every node on each rank's values, collectives across them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from graphshard.ir import ALL_GATHER, LAUNCHES, REDUCE_SCATTER, WAIT


@dataclass
class _InFlight:
    """A collective that was launched: its inputs by rank are read when it is awaited, as late as the network may."""

    node: Node
    inputs: list[Tensor]

    def arrive(self, rank: int) -> Tensor:
        match self.node.target:
            case target if target is ALL_GATHER:
                return torch.cat(self.inputs)
            case target if target is REDUCE_SCATTER:
                op = self.node.args[1]
                total = reduce(operator.add, self.inputs)  # in rank order
                total = total / len(self.inputs) if op == "avg" else total
                assert op in ("avg", "sum"), op
                return total.chunk(len(self.inputs))[rank].clone() if total.numel() else total
        raise AssertionError(f"{self.node}: no meaning for {self.node.target}")


def run_ranks(gm: GraphModule, args_by_rank: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The results of `gm` on each rank.

    Args:
        gm: a lowered graph, without markers.
        args_by_rank: the arguments of each rank.
    """
    envs: list[dict[Node, Any]] = [{} for _ in args_by_rank]
    remaining = [list(args) for args in args_by_rank]
    for node in gm.graph.nodes:
        if node.op == "output":
            return [[env[out] if isinstance(out, Node) else out for out in node.args[0]] for env in envs]
        if node.target in LAUNCHES:
            assert node.args[-2] == len(envs), f"{node}: world size {node.args[-2]}, want {len(envs)}"
            flight = _InFlight(node, [env[node.args[0]] for env in envs])
        for rank, env in enumerate(envs):
            if node.op == "placeholder":
                env[node] = remaining[rank].pop(0)
            elif node.target in LAUNCHES:
                env[node] = flight
            else:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
                is_wait = node.target is WAIT
                env[node] = args[0].arrive(rank) if is_wait else node.target(*args, **kwargs)
    raise AssertionError("a graph without an output")
