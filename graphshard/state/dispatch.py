"""Which program a call needs: from what shards hold and what users have set, as it stands when the program runs.

A call's state is a small key of integers and settings; the flags of a program, and which tensors go in and come out for
them, are worked out once per key.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from graphshard.fsdp2 import Unit
from graphshard.fsdp2.settings import DEFAULT_SETTINGS, UnitSettings
from graphshard.graph.ir import Direction, Flags, ParamRef
from graphshard.graph.markers import padded_shape
from graphshard.state.shards import HELD, PARTIAL, PENDING, POST_FORWARD, RESIDENT, Shard

# What becomes of a unit's gathered parameters behind a program.
RESHARD, KEEP, TO_POST_FORWARD = 0, 1, 2
# In a slot's state, beside the bits of its shard: whether the same backward will run another call that uses it, whether
# this call gives it a gradient, whether it stays gathered for others of its unit, and whether a later program of this
# backward reduces its gradient.
AGAIN, REACHED, STAYS, LATER = 32, 64, 128, 256


@dataclass(frozen=True)
class UnitState:
    """One unit in one call.

    Attributes:
        settings: of the unit.
        behind: `RESHARD`, `KEEP` or `TO_POST_FORWARD`.
        reduces: whether its gradients are reduced.
        post_forward: (number of shards, group) after forward, where that is another group than the unit's own.
        slots: state of each slot of the unit; empty if nothing is held and no other call follows.
    """

    settings: UnitSettings
    behind: int
    reduces: bool
    post_forward: tuple[int, str] | None
    slots: tuple[int, ...]


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


@dataclass
class Plan:
    """Flags of a program and the slots that they are about, in the order of the extra arguments and results.

    Attributes:
        flags: of the program.
        resident, rejoined, kept, resharded: slots.
        ranks: units whose place in their post-forward group is an argument.
        added: (slot, whether the pending sum is added, not what is held).
        partial: slots.
        unreduced: (slot, position of its gradient among the results) that go into what is held.
        again: the same, into the pending sum.
        local: the same, into what is partial.
        dropped: slots whose gathered value is not needed behind the program.
    """

    flags: Flags = field(default_factory=Flags)
    resident: list[int] = field(default_factory=list)
    rejoined: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    resharded: list[int] = field(default_factory=list)
    ranks: list[Unit] = field(default_factory=list)
    added: list[tuple[int, bool]] = field(default_factory=list)
    partial: list[int] = field(default_factory=list)
    unreduced: list[tuple[int, int]] = field(default_factory=list)
    again: list[tuple[int, int]] = field(default_factory=list)
    local: list[tuple[int, int]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)

    def extra_args(self, shards: Sequence[Shard]) -> list[Any]:
        """Arguments behind the graph's own."""
        args: list[Any] = [shards[slot].full for slot in self.resident]
        args += [shards[slot].post_forward for slot in self.rejoined]
        args += [_rank(unit) for unit in self.ranks]
        args += [shards[slot].pending if pending else shards[slot].held for slot, pending in self.added]
        return args + [shards[slot].partial for slot in self.partial]


def _rank(unit: Unit) -> Tensor:
    return torch.tensor([unit.post_forward_rank], device=unit.device)


def make_plan(
    names: Sequence[str],
    gathered: frozenset[int],
    reduced: dict[int, int],
    binding: Binding,
    states: Sequence[UnitState],
    undefined: frozenset[str] = frozenset(),
    inputs_only: bool = False,
) -> Plan:
    """Works out what a program must do for one state.

    Args:
        names: placeholder of the shard in each slot.
        gathered: slots that the graph gathers.
        reduced: slot -> position among the results of its gradient, in a backward graph.
        binding: an example of a call.
        states: of its units.
        undefined: tangents without a gradient.
        inputs_only: no parameter gets a gradient.
    """
    plan = Plan()
    for unit, slots, state in zip(binding.units, binding.slots, states, strict=True):
        bits = dict(zip(slots, state.slots or (REACHED,) * len(slots), strict=True))
        for slot in slots:
            if slot in gathered and not binding.shards[slot].is_whole:
                _place(plan, slot, bits[slot], state.behind)
            if bits[slot] & (RESIDENT | POST_FORWARD) and not bits[slot] & (AGAIN | STAYS) and state.behind == RESHARD:
                plan.dropped.append(slot)
            if slot in reduced and bits[slot] & REACHED and not inputs_only:
                _reduce(plan, slot, reduced[slot], bits[slot], state)
        known = [other.post_forward for other in plan.ranks]
        if any(slot in plan.resharded for slot in slots) and unit.post_forward not in known:
            plan.ranks.append(unit)
    shards = binding.shards
    plan.flags = Flags(
        resident=tuple(names[slot] for slot in plan.resident),
        rejoined=tuple(names[slot] for slot in plan.rejoined),
        kept=tuple(names[slot] for slot in plan.kept),
        resharded=tuple(names[slot] for slot in plan.resharded),
        unreduced=frozenset(names[slot] for slot, _ in (*plan.unreduced, *plan.again)),
        added=tuple((names[slot], _added_dtype(shards[slot], pending)) for slot, pending in plan.added),
        partial=tuple(names[slot] for slot in plan.partial),
        undefined=undefined,
        inputs_only=inputs_only,
        units=tuple(
            (unit.name, state.settings)
            for unit, state in zip(binding.units, states, strict=True)
            if state.settings != DEFAULT_SETTINGS
        ),
    )
    return plan


def usual_flags(direction: Direction, binding: Binding) -> Flags:
    """Flags of a program that gathers and reduces everything."""
    forward = direction != "backward"
    settings = ((unit.name, unit.forward_settings() if forward else unit.backward_settings()) for unit in binding.units)
    return Flags(units=tuple((name, own) for name, own in settings if own != DEFAULT_SETTINGS))


def _place(plan: Plan, slot: int, bits: int, behind: int) -> None:
    if bits & RESIDENT:
        plan.resident.append(slot)
        return
    if bits & POST_FORWARD:
        plan.rejoined.append(slot)
    if behind == KEEP:
        plan.kept.append(slot)
    elif behind == TO_POST_FORWARD and not bits & POST_FORWARD:
        plan.resharded.append(slot)


def _reduce(plan: Plan, slot: int, position: int, bits: int, state: UnitState) -> None:
    if bits & AGAIN:
        plan.again.append((slot, position))
        return
    if bits & PENDING:
        plan.added.append((slot, True))
    if bits & HELD:
        plan.added.append((slot, False))
    if not state.reduces or bits & LATER:
        plan.unreduced.append((slot, position))
        return
    if bits & PARTIAL:
        plan.partial.append(slot)
    if not state.settings.all_reduce:
        plan.local.append((slot, position))


def _added_dtype(shard: Shard, pending: bool) -> torch.dtype:
    earlier = shard.pending if pending else shard.held
    assert earlier is not None
    return earlier.dtype


def post_forward_ref(param: ParamRef) -> ParamRef:
    """The parameter as its post-forward shards have it."""
    assert param.post_forward is not None
    count, _ = param.post_forward
    numel = math.prod(padded_shape(param.size, count, param.dim)) // count
    return replace(param, shard_numel=numel)
