"""What outlives programs: gathered parameters that stay, gradients that are not reduced yet, and when both end."""

from __future__ import annotations

from torch import nn

from graphshard.fsdp2 import Unit
from graphshard.reporting.report import Report
from graphshard.state.calls import LiveCalls
from graphshard.state.residency import Residency
from graphshard.state.running_forward import RunningForward
from graphshard.state.shard_table import ShardTable
from graphshard.state.split_units import SplitUnits
from graphshard.state.unit_gathers import UnitGathers
from graphshard.state.unit_programs import UnitPrograms
from graphshard.state.unit_reductions import UnitReductions
from graphshard.state.unit_state import KEEP, RESHARD


class Holdings:
    """What the shards of one model hold between programs.

    Args:
        shards: of the model.
        programs: gather and reduce whole units.
        report: of the model.

    Attributes:
        shards: of the model.
        forward: that runs.
        residency: what stays gathered behind it.
        gathers: of whole units.
        reductions: of whole units.
        split: units that regions use in parts.
        calls: calls of regions whose backward is still to come.
    """

    def __init__(self, shards: ShardTable, programs: UnitPrograms, report: Report) -> None:
        self.shards = shards
        self.forward = RunningForward(shards)
        self.residency = Residency(self.forward)
        self.gathers = UnitGathers(shards, programs)
        self.reductions = UnitReductions(shards, programs, self.gathers)
        self.split = SplitUnits(shards, self.forward, self.residency, report)
        self.calls = LiveCalls()

    def begin_forward(self, module: nn.Module) -> None:
        """A call of `module` begins."""
        self.forward.begin(module)
        if not self.forward.in_backward:
            self.gathers.drop_outdated()
        for unit, _ in self.shards.by_unit():
            if unit.reduce_unused:
                # Ranks may use other parameters of it than this one: all take part in one gather of the whole.
                self.gathers.unshard([unit]).wait()

    def end_module(self, unit: Unit, module: nn.Module) -> None:
        """The forward of a unit's module ends, outside any graph."""
        is_last = self.forward.end_module(unit, module)
        if is_last and unit in self.shards.active and self.residency.behind_forward(unit) == RESHARD:
            self.gathers.reshard([unit])

    def end_forward(self) -> None:
        """The outermost call ends."""
        for unit in self.forward.touched:
            behind, is_pinned = self.residency.at_end_of_forward(unit), unit in self.residency.pinned
            if behind == KEEP and self.residency.stays_by_flag(unit):
                self.gathers.stay_whole([unit])
            elif behind == KEEP:  # as was planned: FSDP2 has shards in modules
                for shard in self.shards.of(unit):
                    shard.hide()
            if unit in self.shards.active:
                for shard in self.shards.of(unit):
                    # Autograd cannot use what inference mode has made.
                    unusable = shard.full is not None and shard.full.is_inference() and not is_pinned
                    if shard.full is not None and (behind == RESHARD or unusable):
                        shard.reshard()
        self.forward.touched.clear()

    def reset(self) -> None:
        """Forgets what a failed step left behind."""
        self.reductions.finish()
        self.gathers.reshard_all()
        for shard in self.shards:
            shard.drop_grads()
        self.calls.clear()
        self.shards.active.clear()
