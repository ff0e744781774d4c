"""What a program takes and yields besides the arguments and results of its graph, by the states of its units.

Worked out once per key of states: which program a call needs is looked up by that key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from graphshard.fsdp2.settings import DEFAULT_SETTINGS
from graphshard.graph.ir import Direction, Flags, ParamRef
from graphshard.graph.markers import padded_shape
from graphshard.state.binding import Binding
from graphshard.state.shards import HELD, PARTIAL, PENDING, POST_FORWARD, RESIDENT, Shard
from graphshard.state.unit_state import AGAIN, KEEP, LATER, REACHED, RESHARD, STAYS, TO_POST_FORWARD, UnitState


@dataclass
class CallingConvention:
    """Flags of a program and the slots that they are about, in the order of the extra arguments and results.

    Attributes:
        flags: of the program.
        resident, rejoined, kept, resharded: slots.
        ranks: this rank's place, and its device, by post-forward group: arguments. No units, which hold their model.
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
    ranks: dict[tuple[int, str], tuple[int, torch.device]] = field(default_factory=dict)
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
        args += [_rank_index(rank, device) for rank, device in self.ranks.values()]
        args += [shards[slot].pending if pending else shards[slot].held for slot, pending in self.added]
        return args + [shards[slot].partial for slot in self.partial]


@cache
def _rank_index(rank: int, device: torch.device) -> torch.Tensor:
    """`[1]`, int64; made once: a copy to a GPU waits for what it computes."""
    with torch.inference_mode(False):  # autograd keeps it for backward
        return torch.tensor([rank], device=device)


def calling_convention(
    names: Sequence[str],
    gathered: frozenset[int],
    reduced: dict[int, int],
    binding: Binding,
    states: Sequence[UnitState],
    undefined: frozenset[str] = frozenset(),
    inputs_only: bool = False,
) -> CallingConvention:
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
    convention = CallingConvention()
    for unit, slots, state in zip(binding.units, binding.slots, states, strict=True):
        bits = dict(zip(slots, state.slots or (REACHED,) * len(slots), strict=True))
        for slot in slots:
            if slot in gathered and not binding.shards[slot].is_whole:
                _place(convention, slot, bits[slot], state.behind)
            if bits[slot] & (RESIDENT | POST_FORWARD) and not bits[slot] & (AGAIN | STAYS) and state.behind == RESHARD:
                convention.dropped.append(slot)
            if slot in reduced and bits[slot] & REACHED and not inputs_only:
                _reduce(convention, slot, reduced[slot], bits[slot], state)
        if unit.post_forward is not None and any(slot in convention.resharded for slot in slots):
            convention.ranks[unit.post_forward] = unit.post_forward_rank, unit.device
    shards = binding.shards
    convention.flags = Flags(
        resident=tuple(names[slot] for slot in convention.resident),
        rejoined=tuple(names[slot] for slot in convention.rejoined),
        kept=tuple(names[slot] for slot in convention.kept),
        resharded=tuple(names[slot] for slot in convention.resharded),
        unreduced=frozenset(names[slot] for slot, _ in (*convention.unreduced, *convention.again)),
        added=tuple((names[slot], _added_dtype(shards[slot], pending)) for slot, pending in convention.added),
        partial=tuple(names[slot] for slot in convention.partial),
        undefined=undefined,
        inputs_only=inputs_only,
        units=tuple(
            (unit.name, state.settings)
            for unit, state in zip(binding.units, states, strict=True)
            if state.settings != DEFAULT_SETTINGS
        ),
    )
    return convention


def usual_flags(direction: Direction, binding: Binding) -> Flags:
    """Flags of a program that gathers and reduces everything."""
    forward = direction != "backward"
    settings = ((unit.name, unit.forward_settings() if forward else unit.backward_settings()) for unit in binding.units)
    return Flags(units=tuple((name, own) for name, own in settings if own != DEFAULT_SETTINGS))


def _place(convention: CallingConvention, slot: int, bits: int, behind: int) -> None:
    if bits & RESIDENT:
        convention.resident.append(slot)
        return
    if bits & POST_FORWARD:
        convention.rejoined.append(slot)
    if behind == KEEP:
        convention.kept.append(slot)
    elif behind == TO_POST_FORWARD and not bits & POST_FORWARD:
        convention.resharded.append(slot)


def _reduce(convention: CallingConvention, slot: int, position: int, bits: int, state: UnitState) -> None:
    if bits & AGAIN:
        convention.again.append((slot, position))
        return
    if bits & PENDING:
        convention.added.append((slot, True))
    if bits & HELD:
        convention.added.append((slot, False))
    if not state.reduces or bits & LATER:
        convention.unreduced.append((slot, position))
        return
    if bits & PARTIAL:
        convention.partial.append(slot)
    if not state.settings.all_reduce:
        convention.local.append((slot, position))


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
