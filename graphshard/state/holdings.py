"""What outlives programs: gathered parameters that stay, gradients that are not reduced yet, and when both end."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import UnshardHandle

from graphshard.compat.autograd import backward_id
from graphshard.fsdp2 import Unit
from graphshard.reporting.report import Report
from graphshard.state.calls import Call, Entry
from graphshard.state.dispatch import KEEP, RESHARD, TO_POST_FORWARD, Binding
from graphshard.state.shards import Shard
from graphshard.state.unit_programs import Gather, Reduction, UnitPrograms


class Holdings:
    """What the shards of one model hold between programs.

    Attributes:
        active: units of which some shard holds something, or did lately.
        entry: what the user called.
        touched: units that the running forward used.
        split: units of which several regions use parts, because of a graph break: they are gathered and reduced as a
            whole, by a program of their own.
        regions_run: how many regions the running forward has run.
        nested: whether the running forward called a module outside any graph.
        in_backward: whether it recomputes a checkpoint.
        is_inference: whether no backward can follow it.
        calls: calls of regions whose backward is still to come.
    """

    def __init__(self, programs: UnitPrograms, report: Report) -> None:
        self.active: set[Unit] = set()
        self.touched: set[Unit] = set()
        self.split: set[Unit] = set()
        self.regions_run = 0
        self.nested = False
        self._decided: dict[Unit, tuple[bool, bool]] = {}
        self.in_backward = self.is_inference = False
        self.calls: weakref.WeakSet[Call] = weakref.WeakSet()
        self._programs = programs
        self._report = report
        self._shards: dict[Unit, list[Shard]] = {}
        self._gathers: dict[Unit, Gather] = {}  # under way
        self._reductions: deque[Reduction] = deque()  # under way
        self.entry = Entry()
        self._entry_of: dict[int, Entry] = {}

    def install(self, shards: Iterable[Shard]) -> None:
        """Takes over shards, new or renewed."""
        self._shards = {}
        for shard in shards:
            self._shards.setdefault(shard.unit, []).append(shard)
        self._programs.clear()

    # -- by hand

    def unshard(self, units: Iterable[Unit]) -> UnshardHandle:
        """Launches the gather of what is not gathered yet."""
        units = list(units)
        for unit in units:
            if (found := self._gathers.get(unit)) is not None and found.ahead:
                found.stays = True
                self.finish([unit])
            missing = [shard for shard in self._shards[unit] if shard.full is None and not shard.is_whole]
            if missing and unit not in self._gathers:
                self._gathers[unit] = self._programs.launch_gather(missing)
        return _Handle(self, units)

    def finish(self, units: Iterable[Unit]) -> None:
        """Waits for gathers under way; the parameters stay, or are there for the next program."""
        for unit in units:
            if (found := self._gathers.pop(unit, None)) is not None:
                arrived = found.wait()
                if found.ahead and found.is_outdated():  # user code has written a parameter meanwhile
                    arrived = self._programs.launch_gather(found.shards).wait()
                for shard, full in zip(found.shards, arrived, strict=True):
                    if found.stays:
                        shard.stay(full)
                    else:
                        shard.keep(full)
            self.active.add(unit)

    def gather(self, unit: Unit, shards: Sequence[Shard], stays: bool, ahead: bool) -> None:
        """Gathers for a program what of `shards`, of one unit, is neither gathered nor under way.

        Args:
            unit: the unit.
            shards: of it.
            stays: whether they stay behind the program.
            ahead: whether it is launched now and awaited when the program runs.
        """
        if unit in self._gathers:
            return
        if missing := [shard for shard in shards if shard.full is None and not shard.is_whole]:
            found = self._gathers[unit] = self._programs.launch_gather(missing)
            found.stays, found.ahead = stays, ahead
            if not ahead:
                self.finish([unit])

    def settle(self) -> None:
        """Waits until no gather is on its way; who needs one still finds it."""
        for found in self._gathers.values():
            found.settle()

    def drop_ahead(self) -> None:
        """Frees what was launched ahead and not needed."""
        for unit in [unit for unit, found in self._gathers.items() if found.ahead]:
            self._gathers.pop(unit).wait()

    def finish_gathers(self, units: Sequence[Unit]) -> None:
        """Waits for those of `units` that are under way: a program is about to use them."""
        if self._gathers:
            self.finish([unit for unit in units if unit in self._gathers])

    def stay_whole(self, units: Iterable[Unit]) -> None:
        """Registers, gathered, what is whole on this rank."""
        for unit in units:
            for shard in self._shards[unit]:
                if shard.is_whole:
                    shard.stay_whole()
                    self.active.add(unit)

    def reshard(self, units: Iterable[Unit]) -> None:
        """Frees what stays gathered."""
        for unit in units:
            if (found := self._gathers.pop(unit, None)) is not None:
                found.wait()
            for shard in self._shards.get(unit, ()):
                shard.reshard()

    def reshard_all(self) -> None:
        """Frees all that stays gathered."""
        self.reshard(self.in_order(frozenset(self.active) | frozenset(self._gathers)))

    def reset(self) -> None:
        """Forgets what a failed step left behind."""
        self.finish_reductions()
        self.reshard_all()
        for shards in self._shards.values():
            for shard in shards:
                shard.drop_grads()
        self.calls.clear()
        self.active.clear()

    # -- forward

    def begin_forward(self, module: nn.Module) -> None:
        """A call of `module` begins."""
        self.touched.clear()
        self.regions_run, self.nested = 0, False
        self.is_inference = not torch.is_grad_enabled()
        # A checkpoint is recomputed: the backward that follows takes what was gathered for it.
        self.in_backward = backward_id() != -1
        if not self.in_backward:
            self._drop_outdated()
        if (entry := self._entry_of.get(id(module))) is None:
            entry = self._entry_of[id(module)] = self._entered(module)
        self.entry = entry
        for unit in self._shards:
            if unit.reduce_unused:
                # Ranks may use other parameters of it than this one: all take part in one gather of the whole.
                self.unshard([unit]).wait()

    def _drop_outdated(self) -> None:
        """What stays gathered is gathered again if an optimizer has written the parameter since."""
        for unit in self.active:
            for shard in self._shards.get(unit, ()):
                if shard.is_outdated():
                    shard.reshard()

    def _entered(self, module: nn.Module) -> Entry:
        inside = {id(inner) for inner in module.modules()}
        own_units = frozenset(unit for unit in self._shards if any(own is module for own in unit.modules))
        states = {unit.state_id for unit in own_units}
        found = set()
        for unit in self._shards:
            ran = [id(own) in inside for own in unit.modules]
            # The call of another unit's module ends what is incomplete inside.
            if len(ran) > 1 and any(ran) and not all(ran) and (not states or unit.state_id in states):
                found.add(unit)
        name = ", ".join(unit.name or "root" for unit in self.in_order(own_units)) or type(module).__name__
        return Entry(name, own_units, frozenset(found))

    def decide(self, kept: dict[Unit, bool]) -> None:
        """Lets units stay gathered behind forward, or not, until users set that flag anew."""
        self._decided |= {unit: (stays, unit.reshard_after_forward) for unit, stays in kept.items()}

    def behind_forward(self, unit: Unit) -> int:
        """What becomes of a unit's gathered parameters behind the running forward."""
        reshards = unit.reshard_after_forward
        stays, flag = self._decided.get(unit, (not reshards, reshards))
        if (stays if flag == reshards else not reshards) or self._must_stay(unit):
            return KEEP
        return RESHARD if unit.post_forward_mesh is None else TO_POST_FORWARD

    def _must_stay(self, unit: Unit) -> bool:
        """Whether a unit stays gathered behind the running forward, whatever is asked or decided."""
        return unit in self.entry.partial or self.in_backward or unit.reduce_unused

    def _stays_for_backward(self, unit: Unit) -> bool:
        """Whether a unit stays only because that was decided."""
        stays, _ = self._decided.get(unit, (False, False))
        return stays and unit.reshard_after_forward and not self._must_stay(unit)

    def in_order(self, units: frozenset[Unit]) -> list[Unit]:
        """The model's order, which is the same on every rank; that of a set is not."""
        return [unit for unit in self._shards if unit in units]

    def shards_of(self, unit: Unit) -> Sequence[Shard]:
        """All shards of a unit."""
        return self._shards[unit]

    def unit_named(self, name: str) -> Unit:
        """The unit of that name."""
        return next(unit for unit in self._shards if unit.name == name)

    def gather_wholes(self, units: frozenset[Unit]) -> None:
        """Gathers what of `units` is not gathered."""
        for unit in self.in_order(units):
            self.gather_whole(unit)

    def wanted_whole(self, parts: frozenset[Unit], broken: bool) -> frozenset[Unit]:
        """Units to gather as a whole, of those of which a region uses parts; `broken`: a graph break ends it."""
        if broken or self.nested or self.regions_run:
            for unit in self.in_order(parts - self.split):
                self._report.note_once(
                    f"unit '{unit.name or 'root'}' is used in parts by several regions, as behind a graph break "
                    "or with regions='unit': it is gathered and reduced as a whole, outside the graphs"
                )
            self.split |= parts
            return parts
        # What is not used here of a list of modules is for another call.
        return frozenset(unit for unit in parts if len(unit.modules) > 1 and self.behind_forward(unit) == KEEP)

    def split_in(self, binding: Binding) -> frozenset[Unit]:
        """Units that a backward of `binding` must reduce as a whole: others of their parameters take part."""
        return frozenset(
            unit
            for unit in binding.parts
            if unit in self.split
            or (unit in self.active and any(s.held is not None for s in self._shards[unit] if s not in binding.shards))
        )

    def gather_whole(self, unit: Unit) -> None:
        """Gathers what of a unit is not gathered."""
        if unit.world_size > 1:
            self.unshard([unit])
            self.finish([unit])

    def end_unit(self, unit: Unit) -> None:
        """The forward of a unit's module ends, outside any graph."""
        if unit in self.active and self.behind_forward(unit) == RESHARD:
            self.reshard([unit])

    def end_forward(self) -> None:
        """The outermost call ends."""
        for unit in self.touched:
            behind = self.behind_forward(unit)
            if self.is_inference and self._stays_for_backward(unit):
                behind = RESHARD
            if behind == KEEP:
                self.stay_whole([unit])
            if unit in self.active:
                for shard in self._shards[unit]:
                    # Autograd cannot use what inference mode has made.
                    if shard.full is not None and (behind == RESHARD or shard.full.is_inference()):
                        shard.reshard()
        self.touched.clear()

    # -- backward

    def end_split(self, units: frozenset[Unit]) -> None:
        """No other call of this backward uses the split `units`."""
        for unit in self.in_order(units):
            shards = self._shards[unit]
            self._hold_pending(shards)
            if unit.reduce_grads and not unit.reduce_unused:
                self.launch_reduction(unit)
            if unit.reshard_after_backward:
                self.reshard([unit])

    def _hold_pending(self, shards: Sequence[Shard]) -> None:
        for shard in shards:
            if shard.pending is not None:
                shard.hold(shard.pending, shared=True)
                shard.pending = None

    def launch_reduction(self, unit: Unit) -> None:
        """Launches the reduction of what the shards of a unit hold; as many are under way as FSDP2 would have."""
        if left := self._unreduced(unit):
            while len(self._reductions) >= unit.settings().scatter_buffers:
                self._reductions.popleft().wait()
            self._reductions.append(self._programs.launch_reduction(unit, left))

    def finish_reductions(self) -> None:
        """Waits for reductions under way."""
        while self._reductions:
            self._reductions.popleft().wait()

    def end_backward(self, only: frozenset[Unit] = frozenset()) -> None:
        """A backward pass ends: reduces what is left of units that synchronize, frees what does not stay.

        Args:
            only: the units that it ends; empty: all.
        """
        self.finish_reductions()
        for unit, shards in self._shards.items():
            if only and unit not in only:
                continue
            if not (unit in self.active or unit in self._gathers or unit.reduce_unused):
                continue
            self._hold_pending(shards)
            if unit.reduce_grads and (left := self._unreduced(unit)):
                self._programs.reduce(unit, left)
            if unit.reshard_after_backward:
                self.reshard([unit])
                if not any(shard.bits for shard in shards):
                    self.active.discard(unit)

    def _unreduced(self, unit: Unit) -> list[Shard]:
        """What is left to reduce of a unit."""
        shards, settled = self._shards[unit], unit.settings().all_reduce
        if unit.reduce_unused:
            return [shard for shard in shards if shard.leaf.requires_grad]
        return [shard for shard in shards if shard.held is not None or (settled and shard.partial is not None)]

    def unreduced(self) -> list[str]:
        """FQNs of the parameters whose gradients are held."""
        return [
            shard.fqn
            for shards in self._shards.values()
            for shard in shards
            if shard.held is not None or shard.partial is not None
        ]


class _Handle(UnshardHandle):
    def __init__(self, holdings: Holdings, units: list[Unit]) -> None:
        self._holdings = holdings
        self._units = units

    def wait(self) -> None:
        """Waits, and registers the gathered parameters."""
        self._holdings.finish(self._units)
        self._holdings.stay_whole(self._units)
        self._units = []
