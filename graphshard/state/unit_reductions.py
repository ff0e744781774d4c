"""Reductions of what programs left unreduced: of whole units, behind a region or at the end of a backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from graphshard.fsdp2 import Unit
from graphshard.state.crossing import UnitReduction
from graphshard.state.shard_table import ShardTable
from graphshard.state.shards import Shard
from graphshard.state.unit_gathers import UnitGathers
from graphshard.state.unit_programs import UnitPrograms


class UnitReductions:
    """What is reduced of one model's units, and on its way.

    Args:
        shards: of the model.
        programs: reduce their gradients.
        gathers: of its units: what a backward has used is freed when it ends.
    """

    def __init__(self, shards: ShardTable, programs: UnitPrograms, gathers: UnitGathers) -> None:
        self._shards = shards
        self._programs = programs
        self._gathers = gathers
        self._under_way: deque[UnitReduction] = deque()
        self._put_off: list[Unit] = []
        self._synchronized: list[Unit] = []

    def begin_backward(self) -> None:
        """A backward has come to the model: looks which units it synchronizes."""
        self._synchronized = [unit for unit, _ in self._shards.by_unit() if unit.reduce_grads]

    def forget_backward(self) -> bool:
        """The backward that began has failed: forgets what it has left of units that it was to synchronize, which no
        later one may reduce. What others hold is that of earlier backwards, too.

        Returns:
            Whether there was anything.
        """
        found = bool(self._under_way)
        self._put_off.clear()
        while self._under_way:
            self._under_way.popleft().drop()
        for unit, shards in self._shards.by_unit():
            for shard in shards:
                found |= shard.drop_unreduced(held=unit in self._synchronized)
        return found

    def launch(self, units: Sequence[Unit]) -> None:
        """Launches, together, the reduction of what the shards of units hold; as many are under way as FSDP2 would
        have.
        """
        if left := [own for unit in units if (own := self._unreduced(unit))]:
            self.wait(min(unit.settings().scatter_buffers for unit in units) - 1)
            self._under_way.append(self._programs.launch_reduction(left))

    def put_off(self, unit: Unit) -> None:
        """Leaves a unit to a later `launch_put_off`."""
        self._put_off.append(unit)

    def launch_put_off(self, names: Collection[str] | None = None) -> None:
        """Launches, together, reductions that were put off. `names`: of their units; None: all."""
        units = [unit for unit in self._put_off if names is None or unit.name in names]
        self._put_off = [unit for unit in self._put_off if unit not in units]
        if units:
            self.launch(units)

    def wait(self, in_flight: int) -> None:
        """Waits until no more reductions are under way than that."""
        while len(self._under_way) > in_flight:
            self._under_way.popleft().wait()

    def finish(self) -> None:
        """Waits for reductions under way; those that were put off are forgotten: shards hold their gradients."""
        self._put_off.clear()
        self.wait(0)

    def end_split(self, units: frozenset[Unit]) -> list[Unit]:
        """No other call of this backward uses the split `units`: frees them; returns those that are to be reduced."""
        found = []
        for unit in self._shards.in_order(units):
            _hold_pending(self._shards.of(unit))
            if unit.reduce_grads and not unit.reduce_unused:
                found.append(unit)
            if unit.reshard_after_backward:
                for shard in self._shards.of(unit):
                    shard.let_go()
                self._gathers.reshard([unit])
        return found

    def end_backward(self, only: frozenset[Unit] = frozenset()) -> None:
        """A backward pass ends: reduces what is left of units that synchronize, frees what does not stay.

        Args:
            only: the units that it ends; empty: all.
        """
        self.launch_put_off()
        self.finish()
        active = self._shards.active
        for unit, shards in self._shards.by_unit():
            if only and unit not in only:
                continue
            if not (unit in active or self._gathers.is_under_way(unit) or unit.reduce_unused):
                continue
            _hold_pending(shards)
            if unit.reshard_after_backward:  # first: a hook of a gradient may raise
                self._gathers.reshard([unit])
            if unit.reduce_grads and (left := self._unreduced(unit)):
                self._programs.reduce(left)
            if unit.reshard_after_backward and not any(shard.bits for shard in shards):
                active.discard(unit)
            for shard in shards:
                shard.end_backward()

    def _unreduced(self, unit: Unit) -> list[Shard]:
        """What is left to reduce of a unit."""
        shards, settled = self._shards.of(unit), unit.settings().all_reduce
        if unit.reduce_unused:
            return [shard for shard in shards if shard.leaf.requires_grad]
        return [shard for shard in shards if shard.held is not None or (settled and shard.partial is not None)]


def _hold_pending(shards: Sequence[Shard]) -> None:
    for shard in shards:
        if shard.pending is not None:
            shard.hold(shard.pending, shared=True)
            shard.pending = None
