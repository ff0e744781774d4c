"""What collectives yield, as functions of the tensors of all ranks: no process group is involved.

Sums have their terms in the order of ranks, whatever shares a buffer: a bucket has the bits of its members alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from graphshard.graph.ir import LAUNCHES, collective
from graphshard.validation.unchecked import Unchecked
from graphshard.validation.world import World

_c10d = torch.ops._c10d_functional
ALL_TO_ALL = _c10d.all_to_all_single.default
BROADCAST = _c10d.broadcast.default
OWN = (*LAUNCHES, ALL_TO_ALL, BROADCAST)
_ADDS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


class InFlight:
    """The result of a launch before its wait: it is computed then, from what the inputs are by then.

    Attributes:
        inputs: of all ranks, by rank.
    """

    def __init__(self, node: Node, inputs: list[Any], args: list[tuple[Any, ...]], world: World, place: int = 0):
        self.node, self.inputs, self._args, self._world, self._place = node, inputs, args, world, place

    def __getitem__(self, place: int) -> InFlight:
        """One tensor of several."""
        return InFlight(self.node, [given[place] for given in self.inputs], self._args, self._world, place)

    def arrived(self) -> list[Tensor]:
        """The results of all ranks; ranks whose groups bring the same tensors share one where it is the same."""
        known: dict[object, list[Tensor]] = {}
        found: list[Tensor | None] = [None] * self._world.size
        for rank in range(self._world.size):
            if found[rank] is not None:
                continue
            ranks = self._world.members(self._group(rank), rank)
            given = [self.inputs[other] for other in ranks]
            key = tuple(map(id, given))
            if key not in known:
                known[key] = self._results(given, [self._args[other] for other in ranks])
            for other, result in zip(ranks, known[key], strict=True):
                found[other] = result
        return [result for result in found if result is not None]

    def _group(self, rank: int) -> str:
        about = collective(self.node)
        return str(self._args[rank][-1]) if about is None else about.group

    def _results(self, given: list[Tensor], args: list[tuple[Any, ...]]) -> list[Tensor]:
        target, count = self.node.target, len(given)
        if target is ALL_TO_ALL:
            parts = [torch.split_with_sizes(one, splits[2]) for one, splits in zip(given, args, strict=True)]
            return [torch.cat([part[place] for part in parts]) for place in range(count)]
        if target is BROADCAST:
            return [given[int(args[0][1]) % count].clone()] * count
        kind = LAUNCHES[target]
        if kind == "all_gather":
            return [torch.cat(given)] * count
        total = summed(given, str(args[0][1]))
        if kind == "all_reduce":
            return [total] * count
        return [part.clone() for part in total.chunk(count)] if total.numel() else [total.clone() for _ in given]


def summed(given: Sequence[Tensor], op: str) -> Tensor:
    """The reduction of tensors in the order of ranks."""
    if op.lower() not in _ADDS:
        raise Unchecked(f"it reduces with {op!r}")
    total: Tensor = reduce(_ADDS[op.lower()], given)
    if op.lower() == "avg":
        return total / len(given)
    return total.clone() if len(given) == 1 else total
