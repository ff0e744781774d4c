"""Names of programs that are the same on every rank, whatever graph a rank has lowered them from.

A forward is known by the parameters that it uses, by those that its backward gathers again, and by the state that it
runs in; a backward by those of its forward, since what else it needs is the partitioner's choice, which depends on
shapes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from graphshard.agree.contract import ContractParam
from graphshard.fsdp2 import Unit
from graphshard.fsdp2.settings import DEFAULT_SETTINGS
from graphshard.graph.ir import Direction
from graphshard.state.binding import Binding
from graphshard.state.shards import RESIDENT
from graphshard.state.unit_state import REACHED, RESHARD, UnitState

_FROZEN = "frozen gathered"


@dataclass(frozen=True)
class WholeCall:
    """A call that one graph covers on the ranks that decided its contract.

    Attributes:
        structure: of its forward (see `structure`).
        binding: its shards.
        leader: the rank that decides its contracts; None: the lowest.
        direction: of its forward: ``"forward"``, or ``"inference"`` where nothing in it needs a gradient.
    """

    structure: str
    binding: Binding
    leader: int | None
    direction: Direction


@dataclass
class Role:
    """What a call of this rank is to the other ranks.

    Attributes:
        whole: the call as they make it.
        follows: whether this rank's programs are parts of that, or use fewer parameters.
        leg: of a call that is in parts on all ranks, that which it is (see `route`).
    """

    whole: WholeCall
    follows: bool
    leg: object = None


def ordered_units(binding: Binding) -> list[Unit]:
    """The units of a call in the model's order, which is not that of its graph."""
    return sorted(binding.units, key=lambda unit: unit.position)


def contract_params(binding: Binding) -> list[ContractParam]:
    """The parameters of a call, as contracts know them."""
    ordinals = {unit: number for number, unit in enumerate(ordered_units(binding))}
    found = {ContractParam(ordinals[shard.unit], shard.index, shard.fqn) for shard in binding.shards}
    return sorted(found, key=lambda place: (place.unit, place.index))


def structure(binding: Binding, input_grads: int, is_whole: bool, again: Collection[int] = ()) -> str:
    """The parameters of a call, and which of them its backward gathers again.

    Args:
        binding: the call's shards.
        input_grads: how many of its inputs need a gradient: where none does, a backward gathers less.
        is_whole: whether it is all that the user called. Then units count by name, for ranks may use other ones that
            are equal; parts of a call come in one order on all ranks, and equal blocks share them.
        again: slots that the backward gathers: others where code takes another branch with the same parameters.
    """

    def index_of(slot: int) -> int:
        return binding.shards[slot].index

    found = [f"{input_grads} inputs need gradients"]
    for unit in ordered_units(binding):
        if unit.reduce_unused:  # gathered and reduced outside: ranks may use other parameters of it
            continue
        own = [slot for slot, shard in enumerate(binding.shards) if shard.unit is unit]
        if is_whole:
            found.append(unit.name)
        found.append(", ".join(_said_of(binding, slot, again) for slot in sorted(own, key=index_of)))
    return "; ".join(found)


def _said_of(binding: Binding, slot: int, again: Collection[int]) -> str:
    shard = binding.shards[slot]
    frozen, twice = "" if shard.leaf.requires_grad else " frozen", " again" if slot in again else ""
    return f"{shard.index}: {'x'.join(map(str, shard.param.size))}{frozen}{twice}"


def state_text(
    binding: Binding, states: Sequence[UnitState], backward: bool = False, forward: Binding | None = None
) -> str:
    """Where the units of a call are not in their usual state; names no process group, which siblings have others of.

    Of a backward, what is frozen does not count, nor do units of which all is, but for what stays gathered of all that
    its forward used: whether its graph has any of it is the partitioner's choice. `forward`: the shards of that, where
    they are not those of `binding`.
    """
    counts = {shard for shard in binding.shards if shard.leaf.requires_grad or not backward}
    state_of = dict(zip(binding.units, states, strict=True))
    slots_of = dict(zip(binding.units, binding.slots, strict=True))
    counted = {shard.unit for shard in counts}
    units = [unit for unit in ordered_units(binding) if unit in counted]
    ordinals = {unit.name: number for number, unit in enumerate(units)}
    usual = (REACHED,) if backward else (0, REACHED)  # a backward that does not reach a parameter sends other things
    found = []
    for unit in units:
        state = state_of[unit]
        if unit.reduce_unused:
            found.append(f"{ordinals[unit.name]}: outside")
            continue
        settings = replace(state.settings, forward_prefetch=(), backward_prefetch=(), scatter_group="")
        said = [] if settings == DEFAULT_SETTINGS else [str(settings)]
        for chosen in (state.settings.forward_prefetch, state.settings.backward_prefetch):
            said.append(",".join(str(ordinals.get(name, "")) for name in chosen))
        said.append(f"behind {state.behind}" if state.behind != RESHARD else "")
        said.append("" if state.reduces else "unreduced")
        said.append(f"over {state.post_forward[0]}" if state.post_forward else "")
        # What is gathered of parameters that are not sharded is a cast, and changes nothing that is sent.
        seen = ~0 if unit.world_size > 1 else ~RESIDENT
        bits = zip(slots_of[unit], state.slots, strict=True) if state.slots else ()
        unusual = sorted(
            (binding.shards[slot].index, held & seen)
            for slot, held in bits
            if binding.shards[slot] in counts and held & seen not in usual
        )
        said.append(str(unusual) if unusual else "")
        if any(said):
            found.append(f"{ordinals[unit.name]}: {' '.join(filter(None, said))}")
    if backward and (staying := _frozen_that_stay(forward or binding)):
        found.append(f"{_FROZEN}: {', '.join(map(str, staying))}")
    return "; ".join(found)


def _frozen_that_stay(binding: Binding) -> list[int]:
    """Ordinals of units of which something frozen is gathered."""
    frozen = {
        shard.unit
        for shard in binding.shards
        if not shard.leaf.requires_grad and shard.unit.world_size > 1 and shard.bits & RESIDENT
    }
    return [number for number, unit in enumerate(ordered_units(binding)) if unit in frozen]


def shown_state(text: str) -> str:
    """What users have set, of `state_text`: not what the shards hold."""
    words = (re.sub(r" *(behind \d|\[\(.*?\)\])", "", unit) for unit in text.split("; "))
    return "; ".join(unit for unit in words if not unit.endswith(":") and not unit.startswith(_FROZEN) and unit)


def program_key(what: str, structure: str, state: str) -> str:
    """The key of a program's contract, or of another decision about its region (`what`)."""
    return f"{what}\n{structure}\n{state}"
