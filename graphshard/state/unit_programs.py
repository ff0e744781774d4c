"""Programs for a whole unit, outside any region: gathering by hand, and reducing what regions left unreduced.

They are lowered from small marked graphs by the same passes as a region's, one bucket each, and run operator by
operator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from graphshard.compat.tensors import fake_tensors
from graphshard.faults import compiling, run_program
from graphshard.fsdp2 import Unit
from graphshard.graph.cut_at_wait import Half, cut_at_wait
from graphshard.graph.gather_outputs import with_gather_outputs
from graphshard.graph.ir import WAIT, Direction, PassContext, launch_counts
from graphshard.graph.markers import REDUCE_GRAD, UNSHARD
from graphshard.graph.printer import format_graph
from graphshard.kernels import fuses_on
from graphshard.lowering import driver
from graphshard.reporting.measuring import communication_facts
from graphshard.reporting.report import ProgramRecord
from graphshard.state.binding import Binding
from graphshard.state.calling_convention import calling_convention
from graphshard.state.model_context import ModelContext
from graphshard.state.shards import PARTIAL, Shard
from graphshard.state.unit_state import REACHED, RESHARD, UnitState

# Takes what the first half of a program left, and the shards it is for.
Finish = Callable[[list[Any], Sequence[Shard]], Any]


class UnitGather:
    """A gather of parameters of one unit under way: launched, not awaited.

    Args:
        shards: of the parameters.
        crossing: what the first half of the program left for the second.
        finish: that second half, for these parameters.

    Attributes:
        stays: whether what arrives stays until it is resharded, and is registered; else it is for one program.
        ahead: whether a region before the one that needs it has launched it.
    """

    def __init__(self, shards: Sequence[Shard], crossing: list[Any], finish: Finish) -> None:
        self.shards = shards
        self.stays = True
        self.ahead = False
        self._crossing = crossing
        self._finish = finish
        self._written = [shard.written() for shard in shards]

    @torch.no_grad()
    def wait(self) -> Sequence[Tensor]:
        """The gathered parameters."""
        full: Sequence[Tensor] = self._finish(self._crossing, self.shards)
        return full

    def settle(self) -> None:
        """Waits until the collective is over; `wait` has to be called all the same."""
        for value in self._crossing:
            if isinstance(value, Tensor):
                WAIT(value)

    def is_outdated(self) -> bool:
        """Whether a parameter was written since the launch."""
        return any(shard.written() != seen for shard, seen in zip(self.shards, self._written, strict=True))


class UnitReduction:
    """A reduction of gradients of one unit under way: launched, not awaited. Arguments as of a `UnitGather`.

    Args:
        all_reduce: whether the results are the gradients; else they are partial.
    """

    def __init__(self, shards: Sequence[Shard], crossing: list[Any], finish: Finish, all_reduce: bool) -> None:
        self._shards = shards
        self._crossing = crossing
        self._finish = finish
        self._all_reduce = all_reduce

    @torch.no_grad()
    def wait(self) -> None:
        """Puts the reduced gradients on the parameters; partial ones stay with the shards."""
        for shard, result in zip(self._shards, self._finish(self._crossing, self._shards), strict=True):
            if self._all_reduce:
                shard.param.deliver_grad(result)
            else:
                shard.partial = result


@dataclass
class UnitProgram:
    """A lowered program of one unit, in two halves (see `cut_at_wait`)."""

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
        self._programs: dict[tuple[object, ...], UnitProgram] = {}
        self._shared: dict[tuple[object, ...], UnitProgram] = {}

    def clear(self) -> None:
        """Forgets programs: parameters have changed."""
        self._programs.clear()
        self._shared.clear()

    @torch.no_grad()
    def launch_gather(self, shards: Sequence[Shard], record: ProgramRecord | None = None) -> UnitGather:
        """Launches the gather of some parameters of one unit; counts it in `record`, or in one of its own."""
        unit = shards[0].unit
        program = self._program("unshard", shards, UnitState(unit.settings(), RESHARD, True, None, ()))
        (record or program.record).runs += 1
        crossing = self._launch(program, [shard.source for shard in shards], shards)
        return UnitGather(shards, crossing, partial(self._finish, program))

    @torch.no_grad()
    def launch_reduction(
        self, unit: Unit, shards: Sequence[Shard], record: ProgramRecord | None = None
    ) -> UnitReduction:
        """Launches the reduction of what `shards`, of one unit, hold (zeros, where they hold nothing).

        Where the unit does not all-reduce, they will hold what is reduced over the shards. Counts it in `record`, or
        in one of its own.
        """
        args = [_held(shard) for shard in shards]
        bits = tuple(shard.bits & PARTIAL | REACHED for shard in shards)
        settings = unit.settings()
        program = self._program("reduce", shards, UnitState(settings, RESHARD, True, None, bits))
        args += [shard.leaf.detach() for shard in shards]
        args += [shard.partial for shard in shards if shard.partial is not None]
        (record or program.record).runs += 1
        for shard in shards:
            shard.drop_grads()
        crossing = self._launch(program, args, shards)
        return UnitReduction(shards, crossing, partial(self._finish, program), settings.all_reduce)

    def reduce(self, unit: Unit, shards: Sequence[Shard], record: ProgramRecord | None = None) -> None:
        """The same, awaited."""
        self.launch_reduction(unit, shards, record).wait()

    def _launch(self, program: UnitProgram, args: list[Any], shards: Sequence[Shard]) -> list[Any]:
        crossing: list[Any] = run_program(self._name, program.record, program.launch, args, shards)
        if self._executed is not None:
            self._executed.ran(program.record, shards, half=0)
        return crossing

    def _finish(self, program: UnitProgram, crossing: list[Any], shards: Sequence[Shard]) -> Sequence[Tensor]:
        results: Sequence[Tensor] = run_program(self._name, program.record, program.finish, crossing, shards)
        if self._executed is not None:
            self._executed.ran(program.record, shards, half=1)
        return results

    def _program(self, kind: str, shards: Sequence[Shard], state: UnitState) -> UnitProgram:
        key = (kind, tuple(map(id, shards)), state)
        if (found := self._programs.get(key)) is None:
            state = replace(state, settings=state.settings.without_prefetch())
            alike = tuple(
                (shard.spec(), shard.gather_spec(), replace(shard.ref(), fqn="", unit="")) for shard in shards
            )
            common = (kind, alike, shards[0].unit.device, state)
            if (found := self._shared.get(common)) is None:
                with compiling(self._name, f"the {kind} of unit {shards[0].unit.name or 'root'}"):
                    found = self._shared[common] = self._lower(kind, shards, state)
            self._programs[key] = found
        return found

    def _lower(self, kind: str, shards: Sequence[Shard], state: UnitState) -> UnitProgram:
        names = [f"shard_{i}" for i in range(len(shards))]
        gm = _marked(kind, shards, names)
        slots = range(len(shards))
        reduced = {slot: slot for slot in slots} if kind == "reduce" else {}
        gathered = frozenset[int]() if reduced else frozenset(slots)
        flags = calling_convention(names, gathered, reduced, Binding(tuple(shards)), [state]).flags
        params = {name: shard.ref() for name, shard in zip(names, shards, strict=True)}
        direction: Direction = "backward" if reduced else "forward"
        start = time.perf_counter()
        title = f"{self._name}.{kind}.{shards[0].unit.name or 'root'}"
        ctx = PassContext(direction, params, flags, fuses=fuses_on(shards[0].unit.device, self._report.say_once))
        lowered = driver.lower(gm, ctx, title).gm
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
        return UnitProgram(*cut_at_wait(with_gather_outputs(lowered, compiled=False)), record)


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
