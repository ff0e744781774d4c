"""Runs a lowered graph for all ranks in one process: every node on each rank's values, collectives across them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from graphshard.graph.ir import LAUNCHES, WAIT

# Names of process groups, each with the ranks of every one of its instances.
Groups = Mapping[str, Sequence[Sequence[int]]]


def mesh_groups(replicas: int, world_size: int) -> Groups:
    """The groups of a mesh `[replicas, world_size]`: ``"0"`` of the shards, ``"copies"`` of their copies."""
    ranks = torch.arange(replicas * world_size).view(replicas, world_size)
    return {"0": ranks.tolist(), "copies": ranks.t().tolist()}


@dataclass
class _InFlight:
    """A collective that was launched: its inputs by rank are read when it is awaited, as late as the network may."""

    node: Node
    inputs: list[Any]
    groups: Groups

    def __getitem__(self, place: int) -> _InFlight:
        """One tensor of several."""
        return _InFlight(self.node, [inputs[place] for inputs in self.inputs], self.groups)

    def members(self, rank: int) -> Sequence[int]:
        """The ranks of the group that `rank` is in."""
        instances = self.groups[str(self.node.args[-1])]
        (ranks,) = (ranks for ranks in instances if rank in ranks)
        world_size = None if LAUNCHES[self.node.target] == "all_reduce" else self.node.args[-2]
        assert world_size in (None, len(ranks)), f"{self.node}: world size {world_size}, want {len(ranks)}"
        return ranks

    def arrive(self, rank: int) -> Tensor:
        ranks, kind = self.members(rank), LAUNCHES[self.node.target]
        inputs = [self.inputs[other] for other in ranks]
        if kind == "all_gather":
            return torch.cat(inputs)
        op = self.node.args[1]
        total = reduce(operator.add, inputs)  # in rank order
        total = total / len(inputs) if op == "avg" else total
        assert op in ("avg", "sum"), op
        if kind == "all_reduce" or not total.numel():
            return total.clone()
        return total.chunk(len(inputs))[ranks.index(rank)].clone()


def run_ranks(gm: GraphModule, args_by_rank: Sequence[Sequence[Any]], groups: Groups | None = None) -> list[list[Any]]:
    """The results of `gm` on each rank.

    Args:
        gm: a lowered graph, without markers.
        args_by_rank: the arguments of each rank.
        groups: process groups by name, or by the key of what users supplied; None: all ranks are group ``"0"``.
    """
    groups = groups or mesh_groups(1, len(args_by_rank))
    envs: list[dict[Node, Any]] = [{} for _ in args_by_rank]
    remaining = [list(args) for args in args_by_rank]
    for node in gm.graph.nodes:
        if node.op == "output":
            return [[env[out] if isinstance(out, Node) else out for out in node.args[0]] for env in envs]
        if node.target in LAUNCHES:
            inputs = [torch.fx.node.map_arg(node.args[0], env.__getitem__) for env in envs]
            flight = _InFlight(node, inputs, groups)
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
