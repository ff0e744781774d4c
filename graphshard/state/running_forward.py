"""The outermost call of a model that runs now, or ran last."""

from __future__ import annotations

import torch
from torch import nn

from graphshard.compat.autograd import backward_id, saved_tensor_hooks
from graphshard.fsdp2 import Unit
from graphshard.state.calls import Entry
from graphshard.state.shard_table import ShardTable


class RunningForward:
    """What is known of the running forward.

    Args:
        shards: of the model.

    Attributes:
        runs: whether it does now.
        entry: what the user called.
        called: the modules whose calls the user has begun, by id, since someone emptied it.
        touched: units that it used.
        regions_run: how many regions it has run.
        nested: whether it called a module outside any graph.
        in_backward: whether it recomputes a checkpoint.
        has_checkpoints: whether a region has run inside a checkpoint that began in a forward, so far.
        is_inference: whether no backward can follow it.
    """

    def __init__(self, shards: ShardTable) -> None:
        self._shards = shards
        self.runs = False
        self._entry_of: dict[int, Entry] = {}
        self.entry = Entry()
        self.called: set[int] = set()
        self.touched: set[Unit] = set()
        self.regions_run = 0
        self.nested = self.in_backward = self.is_inference = False
        self.has_checkpoints = False
        self._hooks_around: object = None
        self._to_run: dict[Unit, set[int]] = {}

    def begin(self, module: nn.Module) -> None:
        """A call of `module` begins."""
        self.runs = True
        self.called.add(id(module))
        self.touched.clear()
        self._to_run.clear()
        self.regions_run, self.nested = 0, False
        self.is_inference = not torch.is_grad_enabled()
        # A checkpoint is recomputed: the backward that follows takes what was gathered for it.
        self.in_backward = backward_id() != -1
        self._hooks_around = saved_tensor_hooks()
        if (entry := self._entry_of.get(id(module))) is None:
            entry = self._entry_of[id(module)] = self._entered(module)
        self.entry = entry

    def run_region(self) -> None:
        """A region is about to run."""
        if not self.has_checkpoints and not self.in_backward:
            self.has_checkpoints = saved_tensor_hooks() not in (None, self._hooks_around)

    def end_module(self, unit: Unit, module: nn.Module) -> bool:
        """The forward of a unit's `module` ends, outside any graph, where alone it is seen. Returns whether none of the
        unit's modules is left to run.
        """
        left = self._to_run.setdefault(unit, {id(own) for own in unit.modules})
        left.discard(id(module))
        if not left:
            del self._to_run[unit]
        return not left

    def _entered(self, module: nn.Module) -> Entry:
        inside = {id(inner) for inner in module.modules()}
        own_units = frozenset(unit for unit in self._shards.units_of(module) if unit in self._shards)
        states = {unit.state_id for unit in own_units}
        found = set()
        for unit, _ in self._shards.by_unit():
            ran = [id(own) in inside for own in unit.modules]
            # The call of another unit's module ends what is incomplete inside.
            if len(ran) > 1 and any(ran) and not all(ran) and (not states or unit.state_id in states):
                found.add(unit)
        name = ", ".join(unit.name or "root" for unit in self._shards.in_order(own_units)) or type(module).__name__
        return Entry(name, own_units, frozenset(found))
