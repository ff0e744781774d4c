"""Gathers of whole units outside any program: by hand, for several regions, or ahead of the region that needs them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.distributed.fsdp import UnshardHandle

from graphshard.fsdp2 import Unit
from graphshard.state.crossing import UnitGather
from graphshard.state.shard_table import ShardTable
from graphshard.state.shards import Shard
from graphshard.state.unit_programs import UnitPrograms


class UnitGathers:
    """What is gathered of one model's units, and on its way.

    Args:
        shards: of the model.
        programs: gather them.

    Attributes:
        handed_out: units whose shards a forward has given to code around graphs: not gathered ahead of it.
    """

    def __init__(self, shards: ShardTable, programs: UnitPrograms) -> None:
        self._shards = shards
        self._programs = programs
        self._under_way: dict[Unit, UnitGather] = {}
        self.handed_out: set[Unit] = set()

    def unshard(self, units: Iterable[Unit]) -> UnshardHandle:
        """Launches the gather of what is not gathered yet; it stays until it is resharded."""
        units = list(units)
        for unit in units:
            if (found := self._under_way.get(unit)) is not None and found.ahead:
                found.stays = True
                self.finish([unit])
            missing = [shard for shard in self._shards.of(unit) if shard.full is None and not shard.is_whole]
            if missing and unit not in self._under_way:
                self._under_way[unit] = self._programs.launch_gather(missing)
        return _Handle(self, units)

    def finish(self, units: Iterable[Unit]) -> None:
        """Waits for gathers under way; the parameters stay, or are there for the next program."""
        for unit in units:
            if (found := self._under_way.pop(unit, None)) is not None:
                arrived = found.wait()
                if found.ahead and (unit in self.handed_out or found.is_outdated()):  # user code may have written it
                    again = self._programs.launch_gather(found.shards)
                    arrived, found.written = again.wait(), again.written
                for shard, full, written in zip(found.shards, arrived, found.written, strict=True):
                    if found.stays:
                        shard.stay(full, written)
                    else:
                        shard.keep(full, written)
            self._shards.active.add(unit)

    def finish_used(self, units: Sequence[Unit]) -> None:
        """Waits for those of `units` that are under way: a program is about to use them."""
        if self._under_way:
            self.finish([unit for unit in units if unit in self._under_way])

    def gather(self, unit: Unit, shards: Sequence[Shard], stays: bool) -> None:
        """Gathers for a program what of `shards`, of one unit, is neither gathered nor under way.

        Args:
            unit: the unit.
            shards: of it.
            stays: whether they stay behind the program.
        """
        self._launch([(unit, shards, stays)], ahead=False)
        self.finish_used([unit])

    def launch_ahead(self, units: Iterable[tuple[Unit, Sequence[Shard], bool]]) -> None:
        """Launches, together, such gathers of several units, which are awaited when programs need them."""
        self._launch([found for found in units if found[0] not in self.handed_out], ahead=True)

    def _launch(self, units: Iterable[tuple[Unit, Sequence[Shard], bool]], ahead: bool) -> None:
        wanted = []
        for unit, shards, stays in units:
            missing = [shard for shard in shards if shard.full is None and not shard.is_whole]
            if missing and unit not in self._under_way:
                wanted.append((unit, missing, stays))
        if wanted:
            launched = self._programs.launch_gathers([missing for _, missing, _ in wanted])
            for (unit, _, stays), found in zip(wanted, launched, strict=True):
                self._under_way[unit] = found
                found.stays, found.ahead = stays, ahead

    def gather_whole(self, units: frozenset[Unit]) -> None:
        """Gathers what of `units` is not gathered; it stays."""
        for unit in self._shards.in_order(units):
            if unit.world_size > 1:
                self.unshard([unit])
                self.finish([unit])

    def is_under_way(self, unit: Unit) -> bool:
        """Whether a gather of the unit was launched and not awaited."""
        return unit in self._under_way

    def launched_ahead(self, units: Iterable[Unit]) -> frozenset[Unit]:
        """Those of `units` whose gathers were launched ahead, and not awaited."""
        under_way = ((unit, self._under_way.get(unit)) for unit in units)
        return frozenset(unit for unit, found in under_way if found is not None and found.ahead)

    def settle(self) -> None:
        """Waits until no gather is on its way; who needs one still finds it."""
        for found in self._under_way.values():
            found.settle()

    def drop_ahead(self) -> None:
        """Frees what was launched ahead and not needed."""
        for unit in [unit for unit, found in self._under_way.items() if found.ahead]:
            self._under_way.pop(unit).wait()

    def drop_outdated(self) -> None:
        """Frees what stays of parameters that an optimizer has written since: they are gathered again."""
        for unit in self._shards.active:
            for shard in self._shards.of(unit):
                if shard.is_outdated():
                    shard.reshard()

    def stay_whole(self, units: Iterable[Unit]) -> None:
        """Registers, gathered, what is whole on this rank."""
        for unit in units:
            for shard in self._shards.of(unit):
                if shard.is_whole:
                    shard.stay_whole()
                    self._shards.active.add(unit)

    def show(self, units: Sequence[Unit]) -> None:
        """Registers what stays gathered of `units`, or is whole on this rank."""
        for unit in units:
            for shard in self._shards.of(unit):
                shard.show()
        self.stay_whole(units)

    def reshard(self, units: Iterable[Unit]) -> None:
        """Frees what stays gathered."""
        for unit in units:
            if (found := self._under_way.pop(unit, None)) is not None:
                found.wait()
            for shard in self._shards.of(unit):
                shard.reshard()

    def reshard_all(self) -> None:
        """Frees all that stays gathered."""
        self.reshard(self._shards.in_order(frozenset(self._shards.active) | frozenset(self._under_way)))


class _Handle(UnshardHandle):
    def __init__(self, gathers: UnitGathers, units: list[Unit]) -> None:
        self._gathers = gathers
        self._units = units

    def wait(self) -> None:
        """Waits, and registers the gathered parameters."""
        self._gathers.finish(self._units)
        self._gathers.show(self._units)
        self._units = []
