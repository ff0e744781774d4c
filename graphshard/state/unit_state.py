"""One unit in one call, as a small key of integers and settings: what its shards hold and what users have set."""

from __future__ import annotations

from dataclasses import dataclass

from graphshard.fsdp2.settings import UnitSettings

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
