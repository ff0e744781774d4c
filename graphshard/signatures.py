"""Names of programs that are the same on every rank, whatever graph a rank has lowered them from.

A forward is known by the parameters that it uses and by the state that it runs in; a backward by those of its forward,
since what a backward still needs is the partitioner's choice, which depends on shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphshard.dispatch import REACHED, RESHARD, Binding, UnitState
from graphshard.fsdp2 import Unit
from graphshard.settings import DEFAULT_SETTINGS


def ordered_units(binding: Binding) -> list[Unit]:
    """The units of a call in the model's order, which is not that of its graph."""
    return sorted(binding.units, key=lambda unit: unit.position)


def structure(binding: Binding) -> str:
    """The parameters of a call; equal blocks have the same."""
    found = []
    for unit in ordered_units(binding):
        own = sorted((shard.index, shard.param.size) for shard in binding.shards if shard.unit is unit)
        found.append(", ".join(f"{index}: {'x'.join(map(str, size))}" for index, size in own))
    return "; ".join(found)


def state_text(binding: Binding, states: Sequence[UnitState]) -> str:
    """Where the units of a call are not in their usual state; names no process group, which siblings have others of."""
    state_of = dict(zip(binding.units, states, strict=True))
    slots_of = dict(zip(binding.units, binding.slots, strict=True))
    ordinals = {unit.name: number for number, unit in enumerate(ordered_units(binding))}
    found = []
    for unit in ordered_units(binding):
        state = state_of[unit]
        settings = replace(state.settings, forward_prefetch=(), backward_prefetch=(), scatter_group="")
        said = [] if settings == DEFAULT_SETTINGS else [str(settings)]
        for chosen in (state.settings.forward_prefetch, state.settings.backward_prefetch):
            said.append(",".join(str(ordinals.get(name, "")) for name in chosen))
        said.append(f"behind {state.behind}" if state.behind != RESHARD else "")
        said.append("" if state.reduces else "unreduced")
        said.append(f"over {state.post_forward[0]}" if state.post_forward else "")
        bits = zip(slots_of[unit], state.slots, strict=True) if state.slots else ()
        unusual = sorted((binding.shards[slot].index, held) for slot, held in bits if held not in (0, REACHED))
        said.append(str(unusual) if unusual else "")
        if any(said):
            found.append(f"{ordinals[unit.name]}: {' '.join(filter(None, said))}")
    return "; ".join(found)
