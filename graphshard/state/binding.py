"""The shards that one call of a region brings."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch

from graphshard.fsdp2 import Unit
from graphshard.fsdp2.settings import UnitSettings
from graphshard.state.shards import Shard
from graphshard.state.unit_state import UnitState


class Binding:
    """The shards that one call of a region brings, in slot order, and their grouping into units.

    Equal blocks share a region; `grouping` says whether they also share a program: (ordinal of the unit, index in it)
    per slot.
    """

    def __init__(self, shards: tuple[Shard, ...]) -> None:
        ordinals: dict[int, int] = {}
        self.shards = shards
        self.grouping = tuple((ordinals.setdefault(id(shard.unit), len(ordinals)), shard.index) for shard in shards)
        self.units: list[Unit] = list({id(shard.unit): shard.unit for shard in shards}.values())
        self.slots: list[list[int]] = [[] for _ in self.units]
        for slot, (ordinal, _) in enumerate(self.grouping):
            self.slots[ordinal].append(slot)
        self.unit_set = frozenset(self.units)
        self._unnamed: dict[int, tuple[UnitSettings, tuple[object, ...]]] = {}
        self._own = {unit.name: ordinal for ordinal, unit in enumerate(self.units)}
        self.parts = frozenset(
            unit for unit, slots in zip(self.units, self.slots, strict=True) if len(slots) < len(unit.params)
        )  # units of which only some parameters are here
        self._in_order: dict[str, list[tuple[Unit, tuple[Shard, ...]]]] = {}
        self._overlaps: weakref.WeakKeyDictionary[Binding, frozenset[Shard]] = weakref.WeakKeyDictionary()

    @cached_property
    def shard_set(self) -> frozenset[Shard]:
        """The shards."""
        return frozenset(self.shards)

    @property
    def device(self) -> torch.device | None:
        """Of the shards; None if there are none."""
        return self.units[0].device if self.units else None

    def in_order(self, part: str, slots: Sequence[int]) -> list[tuple[Unit, tuple[Shard, ...]]]:
        """Units in the order of their first slot in `slots`, and their shards in `slots`. `part`: of the graph."""
        if (found := self._in_order.get(part)) is None:
            by_unit: dict[Unit, list[int]] = {}
            for slot in slots:
                by_unit.setdefault(self.shards[slot].unit, []).append(slot)
            # A unit's shards in the order of its slots: so a program of theirs is one program.
            found = [(unit, tuple(self.shards[slot] for slot in sorted(own))) for unit, own in by_unit.items()]
            self._in_order[part] = found
        return found

    def overlap(self, other: Binding) -> frozenset[Shard]:
        """Trainable shards of both."""
        if (found := self._overlaps.get(other)) is None:
            trainable = (shard for shard in self.shards if shard.leaf.requires_grad)
            found = self._overlaps[other] = frozenset(trainable) & frozenset(other.shards)
        return found

    def key(self, states: Sequence[UnitState]) -> tuple[object, ...]:
        """What programs of equal blocks have in common: units by ordinal, not by name."""
        return tuple(self._key(state) for state in states)

    def _key(self, state: UnitState) -> object:
        settings = state.settings
        if not (settings.forward_prefetch or settings.backward_prefetch):
            return state
        # By identity: a unit's settings are one object as long as nothing changes.
        if (found := self._unnamed.get(id(settings))) is None or found[0] is not settings:
            chosen = (self._ordinals(settings.forward_prefetch), self._ordinals(settings.backward_prefetch))
            unnamed = replace(settings, forward_prefetch=(), backward_prefetch=())
            found = self._unnamed[id(settings)] = (settings, (unnamed, *chosen))
        return found[1], state.behind, state.reduces, state.post_forward, state.slots

    def _ordinals(self, names: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(self._own[name] for name in names if name in self._own)
