"""Programs for a whole unit, outside any region: gathering by hand, and reducing what regions left unreduced.

They are lowered from small marked graphs by the same passes as a region's, one bucket each, and run operator by
operator.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from graphshard.compat.tensors import fake_tensors
from graphshard.errors import VerifyError
from graphshard.faults import compiling, run_program
from graphshard.graph.all_together import all_together
from graphshard.graph.cut_at_wait import Half, cut_at_wait
from graphshard.graph.gather_outputs import with_gather_outputs
from graphshard.graph.ir import Direction, PassContext, launch_counts
from graphshard.graph.markers import REDUCE_GRAD, UNSHARD
from graphshard.graph.printer import format_graph
from graphshard.kernels import fuses_on
from graphshard.lowering import driver
from graphshard.reporting.artifacts import show_program
from graphshard.reporting.measuring import communication_facts
from graphshard.reporting.report import ProgramRecord
from graphshard.state.binding import Binding
from graphshard.state.calling_convention import calling_convention
from graphshard.state.crossing import Crossing, UnitGather, UnitReduction
from graphshard.state.model_context import ModelContext
from graphshard.state.shards import PARTIAL, Shard
from graphshard.state.unit_state import REACHED, RESHARD, UnitState

log = logging.getLogger(__name__)


@dataclass
class UnitProgram:
    """A lowered program of whole units, in two halves (see `cut_at_wait`)."""

    launch: Half
    finish: Half
    record: ProgramRecord


class UnitPrograms:
    """The unit programs of one model. Equal units share them.

    Args:
        context: of the model.
    """

    def __init__(self, context: ModelContext) -> None:
        self._name = context.name
        self._report = context.report
        self._executed = context.executed
        self._strict = context.strict
        self._programs: dict[tuple[object, ...], UnitProgram] = {}
        self._shared: dict[tuple[object, ...], UnitProgram] = {}

    def clear(self) -> None:
        """Forgets which shards have which program: parameters have changed."""
        self._programs.clear()

    def launch_gather(self, shards: Sequence[Shard], record: ProgramRecord | None = None) -> UnitGather:
        """Launches the gather of some parameters of one unit; counts it in `record`, or in one of its own."""
        return self.launch_gathers([shards], record)[0]

    @torch.no_grad()
    def launch_gathers(self, units: Sequence[Sequence[Shard]], record: ProgramRecord | None = None) -> list[UnitGather]:
        """The same of several units, together."""
        shards = [shard for own in units for shard in own]
        states = [UnitState(own[0].unit.settings(), RESHARD, True, None, ()) for own in units]
        program = self._program("unshard", shards, states)
        (record or program.record).runs += 1
        crossing = self._launch(program, [shard.source for shard in shards], shards)
        return [UnitGather(own, crossing) for own in units]

    @torch.no_grad()
    def launch_reduction(self, units: Sequence[Sequence[Shard]], record: ProgramRecord | None = None) -> UnitReduction:
        """Launches the reduction of what shards of units hold (zeros, where they hold nothing), together.

        Where a unit does not all-reduce, they will hold what is reduced over the shards. Counts it in `record`, or
        in one of its own.
        """
        shards = [shard for own in units for shard in own]
        args = [_held(shard) for shard in shards]
        states = [
            UnitState(
                own[0].unit.settings(), RESHARD, True, None, tuple(shard.bits & PARTIAL | REACHED for shard in own)
            )
            for own in units
        ]
        program = self._program("reduce", shards, states)
        args += [shard.leaf.detach() for shard in shards]
        args += [shard.partial for shard in shards if shard.partial is not None]
        (record or program.record).runs += 1
        for shard in shards:
            shard.drop_grads()
        all_reduced = [state.settings.all_reduce for own, state in zip(units, states, strict=True) for _ in own]
        return UnitReduction(shards, self._launch(program, args, shards), all_reduced)

    def reduce(self, shards: Sequence[Shard], record: ProgramRecord | None = None) -> None:
        """The same of one unit, awaited."""
        self.launch_reduction([shards], record).wait()

    def _launch(self, program: UnitProgram, args: list[Any], shards: Sequence[Shard]) -> Crossing:
        values: list[Any] = run_program(self._name, program.record, program.launch, args, shards)
        if self._executed is not None:
            self._executed.ran(program.record, shards, half=0)
        return Crossing(shards, values, partial(self._finish, program))

    def _finish(self, program: UnitProgram, values: list[Any], shards: Sequence[Shard]) -> Sequence[Tensor]:
        results: Sequence[Tensor] = run_program(self._name, program.record, program.finish, values, shards)
        if self._executed is not None:
            self._executed.ran(program.record, shards, half=1)
        return results

    def _program(self, kind: str, shards: Sequence[Shard], states: Sequence[UnitState]) -> UnitProgram:
        key = (kind, tuple(map(id, shards)), *states)
        if (found := self._programs.get(key)) is None:
            states = [replace(state, settings=state.settings.without_prefetch()) for state in states]
            ordinals = {shard.unit: f"{place}" for place, shard in enumerate(shards)}
            alike = tuple(
                (shard.spec(), shard.gather_spec(), replace(shard.ref(), fqn="", unit=ordinals[shard.unit]))
                for shard in shards
            )
            common = (kind, alike, shards[0].unit.device, *states)
            if (found := self._shared.get(common)) is None:
                with compiling(self._name, f"the {kind} of {_names(shards)}"):
                    found = self._shared[common] = self._lower(kind, shards, states)
            self._programs[key] = found
        return found

    def _lower(self, kind: str, shards: Sequence[Shard], states: Sequence[UnitState]) -> UnitProgram:
        names = [f"shard_{i}" for i in range(len(shards))]
        gm = _marked(kind, shards, names)
        slots = range(len(shards))
        reduced = {slot: slot for slot in slots} if kind == "reduce" else {}
        gathered = frozenset[int]() if reduced else frozenset(slots)
        flags = calling_convention(names, gathered, reduced, Binding(tuple(shards)), states).flags
        params = {name: shard.ref() for name, shard in zip(names, shards, strict=True)}
        direction: Direction = "backward" if reduced else "forward"
        start = time.perf_counter()
        title = f"{self._name}.{kind}.{shards[0].unit.name or 'root'}"
        planner = all_together if len(states) > 1 else None
        ctx = PassContext(
            direction, params, flags, planner, fuses=fuses_on(shards[0].unit.device, self._report.say_once)
        )
        try:
            lowered = driver.lower(gm, ctx, title).gm
        except VerifyError as error:  # what all ranks send is not this rank's to change
            optional = frozenset[str]() if self._strict else driver.OWN
            lowered = driver.lower(gm, driver.leaves_out(error, optional, ctx, self._report.note_once, title), title).gm
        record = ProgramRecord(
            -1,
            kind,
            str(flags),
            launch_counts(lowered.graph),
            time.perf_counter() - start,
            0.0,
            ir=format_graph(lowered.graph),
            **communication_facts(lowered.graph, shards),
        )
        self._report.programs.append(record)
        log.info("graphshard: %s: passes %.1f s, runs operator by operator", title, record.passes_s)
        show_program(self._name, title, record, self._report, str)
        return UnitProgram(*cut_at_wait(with_gather_outputs(lowered, compiled=False)), record)


def _names(shards: Sequence[Shard]) -> str:
    """What errors say of their units."""
    first, last = shards[0].unit.name or "root", shards[-1].unit.name or "root"
    return f"unit {first}" if first == last else f"units {first} to {last}"


def _held(shard: Shard) -> Tensor:
    if shard.held is not None:
        return shard.held
    spec = shard.spec()
    return torch.zeros(spec.size, dtype=spec.reduce_dtype, device=shard.unit.device)


def _marked(kind: str, shards: Sequence[Shard], names: Sequence[str]) -> GraphModule:
    graph, mode = Graph(), fake_tensors()
    grads: list[Node] = []
    if kind == "reduce":
        for i, shard in enumerate(shards):
            spec = shard.spec()
            grads.append(graph.placeholder(f"grad_{i}"))
            with mode:
                grads[-1].meta["val"] = torch.empty(spec.size, dtype=spec.reduce_dtype, device=shard.unit.device)
    leaves = [graph.placeholder(name) for name in names]
    for leaf, shard in zip(leaves, shards, strict=True):
        like = shard.leaf if kind == "reduce" else shard.source
        with mode:
            leaf.meta["val"] = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    results = []
    for i, (leaf, shard) in enumerate(zip(leaves, shards, strict=True)):
        text = str(shard.spec() if kind == "reduce" else shard.gather_spec())
        if kind == "reduce":
            node = graph.call_function(REDUCE_GRAD, (grads[i], leaf, text))
            args: tuple[Any, ...] = (grads[i].meta["val"], leaf.meta["val"], text)
        else:
            node = graph.call_function(UNSHARD, (leaf, text))
            args = (leaf.meta["val"], text)
        with mode:
            node.meta["val"] = node.target(*args)  # type: ignore[operator]
        results.append(node)
    graph.output(tuple(results))
    return GraphModule({}, graph)
