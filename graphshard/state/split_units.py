"""Units of which several regions use parts, because of a graph break: gathered and reduced as a whole."""

from __future__ import annotations

import weakref

from graphshard.fsdp2 import Unit
from graphshard.reporting.report import Report
from graphshard.state.binding import Binding
from graphshard.state.residency import Residency
from graphshard.state.running_forward import RunningForward
from graphshard.state.shard_table import ShardTable
from graphshard.state.unit_state import KEEP


class SplitUnits:
    """The split units of one model.

    Args:
        shards: of the model.
        forward: that runs.
        residency: what stays gathered behind it.
        report: of the model.

    Attributes:
        units: that are split; they are gathered and reduced by programs of their own. Weak, since regions have them.
    """

    def __init__(self, shards: ShardTable, forward: RunningForward, residency: Residency, report: Report) -> None:
        self._shards = shards
        self._forward = forward
        self._residency = residency
        self._report = report
        self.units: weakref.WeakSet[Unit] = weakref.WeakSet()

    def in_forward(self, parts: frozenset[Unit], broken: bool) -> frozenset[Unit]:
        """Units to gather as a whole, of those of which a region uses parts; `broken`: it is no whole call."""
        if broken or self._forward.nested or self._forward.regions_run:
            for unit in parts:
                if unit not in self.units:
                    self.units.add(unit)
                    self._report.note_once(
                        f"{type(unit.modules[0]).__name__.removeprefix('FSDP')}: its units are used in parts by several"
                        " regions, as behind a graph break or with regions='unit': they are gathered and reduced as a "
                        "whole, outside the graphs"
                    )
            return parts
        # What is not used here of a list of modules is for another call.
        behind = self._residency.behind_forward
        return frozenset(unit for unit in parts if len(unit.modules) > 1 and behind(unit) == KEEP)

    def in_backward(self, binding: Binding) -> frozenset[Unit]:
        """Units that a backward of `binding` must reduce as a whole: others of their parameters take part."""
        own = binding.shard_set
        return frozenset(
            unit
            for unit in binding.parts
            if unit in self.units
            or (
                unit in self._shards.active
                and any(shard.held is not None for shard in self._shards.of(unit) if shard not in own)
            )
        )
