"""The state of one call: what its shards hold and its units' flags ask, as it stands now (see `unit_state`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from graphshard.fsdp2 import Unit
from graphshard.state.binding import Binding
from graphshard.state.calls import BackwardRequest
from graphshard.state.holdings import Holdings
from graphshard.state.shards import POST_FORWARD, RESIDENT
from graphshard.state.unit_state import AGAIN, KEEP, REACHED, RESHARD, STAYS, UnitState


def forward_states(holdings: Holdings, binding: Binding, whole: frozenset[Unit] = frozenset()) -> list[UnitState]:
    """States of a forward's units.

    Args:
        holdings: of the model.
        binding: the call's shards.
        whole: units that will have been gathered when the program runs.
    """
    shards, resides = binding.shards, RESIDENT | POST_FORWARD
    states = []
    for unit, slots in zip(binding.units, binding.slots, strict=True):
        bits: tuple[int, ...] = ()
        if unit in whole and unit.world_size > 1:
            bits = (RESIDENT,) * len(slots)
        elif unit in holdings.shards.active:
            bits = tuple(shards[slot].bits & resides for slot in slots)
            bits = bits if any(bits) else ()
        states.append(
            UnitState(unit.forward_settings(), holdings.residency.behind_forward(unit), True, unit.post_forward, bits)
        )
    return states


def backward_states(
    holdings: Holdings,
    reduced: Mapping[int, int],
    binding: Binding,
    asked: BackwardRequest,
    dead: frozenset[int],
    split: frozenset[Unit],
    behind: frozenset[Unit] = frozenset(),
) -> list[UnitState]:
    """States of a backward's units.

    Args:
        holdings: of the model.
        reduced: slot -> position of its gradient among the results.
        binding: the call's shards.
        asked: what the running backward asks.
        dead: positions of results without a gradient.
        split: units that are gathered and reduced as a whole.
        behind: units that are reduced behind the program.
    """
    shards, again = binding.shards, asked.again
    # By the model's order: what a graph gathers last is the partitioner's choice, which depends on shapes.
    last = min((unit for unit in binding.units if unit not in asked.entry.units), key=_position, default=None)
    states = []
    for unit, slots in zip(binding.units, binding.slots, strict=True):
        bits: tuple[int, ...] = ()
        frozen = [slot for slot in slots if slot in reduced and not shards[slot].is_trainable]  # since forward
        if again or dead or frozen or unit in holdings.shards.active:
            bits = tuple(
                shards[slot].bits
                | (AGAIN if shards[slot] in again else 0)
                | (STAYS if unit in asked.units_again else 0)
                | (REACHED if reduced.get(slot, -1) not in dead and slot not in frozen else 0)
                for slot in slots
            )
            bits = () if set(bits) == {REACHED} else bits
        # FSDP2 reshards a unit whose inputs need no gradient when backward ends, not between two calls.
        first = unit in asked.entry.units or unit is last
        stays = not unit.reshard_after_backward or (first and not again.isdisjoint(shards))
        reduces = unit.reduce_grads and not unit.reduce_unused and unit not in split and unit not in behind
        states.append(UnitState(unit.backward_settings(), KEEP if stays else RESHARD, reduces, unit.post_forward, bits))
    return states


def reducing_each(binding: Binding, states: Sequence[UnitState], split: frozenset[Unit]) -> list[UnitState]:
    """States of a backward that reduces what users want to have accumulated unreduced, but for `split` units, and those
    of which it is no smaller reduced.
    """
    return [
        replace(state, reduces=True) if accumulates(unit) and unit not in split and not unit.reduce_unused else state
        for unit, state in zip(binding.units, states, strict=True)
    ]


def accumulates(unit: Unit) -> bool:
    """Whether gradients of a unit are to stay unreduced, larger than they would be."""
    return unit.world_size > 1 and not unit.reduce_grads


def reduced_early(binding: Binding, states: Sequence[UnitState]) -> frozenset[Unit]:
    """Units of which that is so."""
    both = zip(binding.units, states, strict=True)
    return frozenset(unit for unit, state in both if state.reduces and not unit.reduce_grads)


def staying_units(binding: Binding, states: Sequence[UnitState]) -> frozenset[Unit]:
    """Units that stay gathered."""
    return frozenset(unit for unit, state in zip(binding.units, states, strict=True) if state.behind == KEEP)


def _position(unit: Unit) -> int:
    return unit.position
