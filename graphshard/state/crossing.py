"""Collectives of whole units under way: launched by the first half of a program, awaited by the second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from graphshard.graph.ir import WAIT
from graphshard.state.shards import Shard

# Takes what the first half of a program left, and the shards it is for.
Finish = Callable[[list[Any], Sequence[Shard]], Any]


class Crossing:
    """A collective of whole units under way.

    Args:
        shards: whose parameters are gathered, or whose gradients are reduced.
        values: what the first half of the program left for the second.
        finish: that second half.
    """

    def __init__(self, shards: Sequence[Shard], values: list[Any], finish: Finish) -> None:
        self._shards = shards
        self._values = values
        self._finish = finish
        self._arrived: dict[Shard, Tensor] | None = None

    @torch.no_grad()
    def take(self, shards: Sequence[Shard]) -> list[Tensor]:
        """Waits, once for all; hands over what arrived for some of the shards."""
        if self._arrived is None:
            self._arrived = dict(zip(self._shards, self._finish(self._values, self._shards), strict=True))
        return [self._arrived.pop(shard) for shard in shards]

    def settle(self) -> None:
        """Waits until the collective is over; `take` has to be called all the same."""
        for value in self._values:
            if isinstance(value, Tensor):
                WAIT(value)


class UnitGather:
    """A gather of parameters of one unit under way: launched, not awaited.

    Args:
        shards: of the parameters.
        crossing: of theirs, and perhaps of other units gathered with them.

    Attributes:
        written: how often each parameter was written at the launch.
        stays: whether what arrives stays until it is resharded, and is registered; else it is for one program.
        ahead: whether a region before the one that needs it has launched it.
    """

    def __init__(self, shards: Sequence[Shard], crossing: Crossing) -> None:
        self.shards = shards
        self.stays = True
        self.ahead = False
        self._crossing = crossing
        self.written = [shard.written() for shard in shards]

    def wait(self) -> Sequence[Tensor]:
        """The gathered parameters, once."""
        return self._crossing.take(self.shards)

    def settle(self) -> None:
        """Waits until the collective is over; `wait` has to be called all the same."""
        self._crossing.settle()

    def is_outdated(self) -> bool:
        """Whether a parameter was written since the launch."""
        return any(shard.written() != seen for shard, seen in zip(self.shards, self.written, strict=True))


class UnitReduction:
    """A reduction of gradients of whole units under way: launched, not awaited.

    Args:
        shards: of the gradients.
        crossing: of theirs.
        all_reduced: whether each is reduced over its copies, too.
    """

    def __init__(self, shards: Sequence[Shard], crossing: Crossing, all_reduced: Sequence[bool]) -> None:
        self._shards = shards
        self._crossing = crossing
        self._all_reduced = all_reduced

    def wait(self) -> None:
        """Puts the reduced gradients on the parameters; partial ones stay with the shards."""
        arrived = self._crossing.take(self._shards)
        for shard, result, all_reduced in zip(self._shards, arrived, self._all_reduced, strict=True):
            if all_reduced:
                with torch.no_grad():
                    shard.param.deliver_grad(result)
            else:
                shard.partial = result

    def drop(self) -> None:
        """Waits for them all the same, and forgets them."""
        self._crossing.take(self._shards)
