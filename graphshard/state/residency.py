"""Which gathered parameters stay behind a forward: as FSDP2's flags ask, or as was planned."""

from __future__ import annotations

from graphshard.fsdp2 import Unit
from graphshard.state.running_forward import RunningForward
from graphshard.state.unit_state import KEEP, RESHARD, TO_POST_FORWARD


class Residency:
    """What stays gathered of one model.

    Args:
        forward: that runs.

    Attributes:
        pinned: units that stay gathered until whoever pinned them lets them go.
    """

    def __init__(self, forward: RunningForward) -> None:
        self._forward = forward
        self.pinned: frozenset[Unit] = frozenset()
        self._decided: dict[Unit, tuple[bool, bool]] = {}  # whether it stays, and what its flag was then

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

    def stays_by_flag(self, unit: Unit) -> bool:
        """Whether a unit stays gathered behind the running forward in FSDP2, whatever was decided."""
        return not unit.reshard_after_forward or self._must_stay(unit)

    def at_end_of_forward(self, unit: Unit) -> int:
        """The same at its end: what was to stay for backward alone goes where there will be none."""
        stays, _ = self._decided.get(unit, (False, False))
        only_decided = stays and unit.reshard_after_forward and not self._must_stay(unit)
        return RESHARD if self._forward.is_inference and only_decided else self.behind_forward(unit)

    def _must_stay(self, unit: Unit) -> bool:
        """Whether a unit stays gathered behind the running forward, whatever is asked or decided."""
        forward = self._forward
        return unit in forward.entry.partial or forward.in_backward or unit.reduce_unused or unit in self.pinned
