"""A region: what Dynamo captured once, and the programs that are lowered from it on demand.

The flags that users flip between steps are read when a program is about to run, and choose it. A program that is
missing is lowered then from the marked graph, in the contexts of the first compilation; nothing is traced again.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor
from torch.fx import GraphModule

from graphshard import driver
from graphshard.calls import Calls
from graphshard.compat import CompileState, boxed, generated_code, hide_results
from graphshard.dispatch import Binding, Plan, UnitState, make_plan
from graphshard.errors import UnsupportedModel
from graphshard.fsdp2 import Unit
from graphshard.holdings import Holdings
from graphshard.ir import (
    LAUNCHES,
    Direction,
    ParamRef,
    PassContext,
    launches,
    output_args,
    reductions,
    shard_placeholder,
    unshards,
)
from graphshard.markers import padded_shape
from graphshard.passes.apply_flags import dead_outputs, is_tangent
from graphshard.passes.apply_residency import REJOINED
from graphshard.printer import format_graph
from graphshard.report import ProgramRecord, Report
from graphshard.shards import Shard
from graphshard.states import backward_states, forward_states

BoxedCallable = Callable[[list[Any]], Any]
# Compiles a lowered graph: (graph, example inputs, the compiler's own arguments) -> code.
CompileGraph = Callable[[GraphModule, Sequence[Any], dict[str, Any]], BoxedCallable]


class Engine(Protocol):
    """What a region asks of the engine of its model."""

    name: str
    report: Report
    shard_at: dict[int, Shard]
    bindings: dict[tuple[int, str, tuple[int, ...]], Binding]
    holdings: Holdings

    def backward_runs(self, only: frozenset[Unit] = frozenset()) -> None:
        """Is told that a backward program runs, which ends the backward of `only` these units, or of all."""

    def touched(self, units: Sequence[Unit]) -> None:
        """Is told that the running forward uses `units`."""


@dataclass
class MarkedGraph:
    """One graph of a region, with markers.

    Attributes:
        slots: (placeholder of a shard, its position among the arguments), in argument order.
        gathered: slots that are gathered.
        last_gathered: the slot that is gathered last, None if none is.
        reduced: slot -> position among the results of its reduced gradient.
        tangents: placeholders of the gradients of outputs.
        kwargs: what the compiler gave along.
    """

    direction: Direction
    gm: GraphModule
    inputs: list[Any]
    slots: list[tuple[str, int]]
    gathered: frozenset[int]
    last_gathered: int | None
    reduced: dict[int, int]
    tangents: list[str]
    kwargs: dict[str, Any]
    state: CompileState


@dataclass
class Program:
    """Compiled code for one graph, grouping and run-time state; `plan` is about its extra arguments and results."""

    run: BoxedCallable
    record: ProgramRecord
    plan: Plan


class Region:
    """Everything that comes from one graph of Dynamo's.

    Dynamo keeps what it compiled as long as the code it compiled it for. That code belongs to the engine, so a region
    must not keep the engine, or a shard, alive: a deleted model could never be freed.

    Args:
        engine: of the model.
        number: of this region, for dumps and reports.
        positions: shards by their position among the graph's inputs.
        num_inputs: number of these inputs.
        broken: whether a graph break ends the graph.
        compile_graph: makes code of a lowered graph.
        patches: compiler configuration for programs that are compiled late.
    """

    def __init__(
        self,
        engine: Engine,
        number: int,
        positions: dict[int, Shard],
        num_inputs: int,
        broken: bool,
        compile_graph: CompileGraph,
        patches: dict[str, Any],
    ) -> None:
        self._engine = weakref.ref(engine)
        self.number = number
        self._positions = {position: weakref.ref(shard) for position, shard in positions.items()}
        self._num_inputs = num_inputs
        self._broken = broken
        self._compile_graph = compile_graph
        self._patches = patches
        self._names: dict[str, int] = {}  # placeholder of a shard -> its position among the region's inputs
        self._programs: dict[tuple[object, ...], Program] = {}
        self._dead: dict[tuple[frozenset[str], bool], frozenset[int]] = {}
        self.calls = Calls(engine.holdings.calls, engine.holdings.split, number)

    @property
    def engine(self) -> Engine:
        """The engine of the model.

        Raises:
            RuntimeError: if the model was deleted while a backward was still to come.
        """
        if (engine := self._engine()) is None:
            raise RuntimeError("backward: the compiled model was deleted; keep it until its last backward has run")
        return engine

    # -- compilation

    def compile(self, gm: GraphModule, inputs: Sequence[Any], *, direction: Direction, **kwargs: Any) -> BoxedCallable:
        """Takes a graph of the region from the compiler's front end; returns what runs in its place."""
        engine, slots = self.engine, self._slots(gm, direction)
        slot_of = {name: slot for slot, (name, _) in enumerate(slots)}
        gathers = [slot_of[shard_placeholder(node).name] for node in unshards(gm.graph)]
        owners = {node: slot_of[shard_placeholder(node).name] for node in reductions(gm.graph)}
        graph = MarkedGraph(
            direction,
            gm,
            list(inputs),
            slots,
            frozenset(gathers),
            gathers[-1] if gathers else None,
            {owners[result]: i for i, result in enumerate(output_args(gm.graph)) if result in owners},
            [node.name for node in gm.graph.nodes if is_tangent(node)],
            kwargs,
            CompileState.capture(self._patches),
        )
        if direction == "backward":
            # Lowered when it first runs: only then it is known what the flags ask for.
            return boxed(lambda args: self._run_backward(graph, args))
        # Forward must be compiled now: backward is traced with the strides that the compiler chose for what it saves.
        found = [self._positions[self._names[name]]() for name, _ in graph.slots]
        binding = Binding(tuple(shard for shard in found if shard is not None))
        whole = engine.holdings.wanted_whole(binding.parts, self._broken)
        self._program(graph, binding, forward_states(engine.holdings, binding, whole), late=False)
        return boxed(lambda args: self._run_forward(graph, args))

    def _slots(self, gm: GraphModule, direction: Direction) -> list[tuple[str, int]]:
        names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
        markers = [*unshards(gm.graph), *reductions(gm.graph)]
        wanted = {shard_placeholder(marker).name for marker in markers}
        if direction != "backward":
            # Tensors that Dynamo kept as attributes come before the inputs.
            attributes = len(names) - self._num_inputs
            self._names = {name: position - attributes for position, name in enumerate(names)}
        slots = []
        for position, name in enumerate(names):
            if name in wanted:
                if self._names.get(name) not in self._positions:
                    raise UnsupportedModel(
                        f"region {self.number}: %{name} of the {direction} graph is gathered, but no sharded parameter "
                        "has its place among the inputs; run this model with `graphshard.eager(model)`"
                    )
                slots.append((name, position))
        return slots

    def _program(
        self,
        graph: MarkedGraph,
        binding: Binding,
        states: list[UnitState],
        undefined: frozenset[str] = frozenset(),
        inputs_only: bool = False,
        late: bool = True,
    ) -> Program:
        key = (graph.direction, binding.grouping, binding.key(states), undefined, inputs_only)
        if (program := self._programs.get(key)) is None:
            names = [name for name, _ in graph.slots]
            plan = make_plan(names, graph.gathered, graph.reduced, binding, states, undefined, inputs_only)
            program = self._programs[key] = self._lower(graph, binding, plan, late)
        return program

    def _lower(self, graph: MarkedGraph, binding: Binding, plan: Plan, late: bool) -> Program:
        params = {name: shard.ref() for (name, _), shard in zip(graph.slots, binding.shards, strict=True)}
        params |= {REJOINED + name: _post_forward_ref(params[name]) for name in plan.flags.rejoined}
        flags = plan.flags
        number = sum(record.region == self.number for record in self.engine.report.programs)
        title = f"{self.engine.name}.region{self.number}.{number}.{graph.direction}"
        lowered = driver.lower(graph.gm, PassContext(graph.direction, params, flags), title)
        inputs = _inputs(graph, lowered.gm)
        start = time.perf_counter()
        if late:
            with graph.state.resumed():
                run = self._compile_graph(lowered.gm, inputs, graph.kwargs)
        else:
            run = self._compile_graph(lowered.gm, inputs, graph.kwargs)
            hide_results(len(flags.kept) + len(flags.resharded))
        compile_s = time.perf_counter() - start
        counts = Counter(LAUNCHES[node.target] for node in launches(lowered.gm.graph))
        record = ProgramRecord(
            self.number,
            graph.direction,
            str(flags),
            {str(kind): count for kind, count in counts.items()},
            lowered.passes_s,
            compile_s,
            ir=format_graph(lowered.gm.graph),
            code=generated_code(run),
        )
        self.engine.report.programs.append(record)
        return Program(run, record, plan)

    # -- run time

    def _bind(self, graph: MarkedGraph, args: list[Any]) -> Binding:
        engine = self.engine
        addresses = tuple(args[position].data_ptr() for _, position in graph.slots)
        key = (self.number, graph.direction, addresses)
        if (binding := engine.bindings.get(key)) is None:
            binding = engine.bindings[key] = Binding(tuple(engine.shard_at[address] for address in addresses))
        return binding

    def _run_forward(self, graph: MarkedGraph, args: list[Any]) -> Any:
        binding = self._bind(graph, args)
        holdings = self.engine.holdings
        self.engine.touched(binding.units)
        if binding.parts:
            for unit in holdings.wanted_whole(binding.parts, self._broken):
                holdings.gather_whole(unit)
        holdings.regions_run += 1
        if graph.direction == "forward":
            self.calls.begin(binding, holdings.entry)
        program = self._program(graph, binding, forward_states(holdings, binding))
        return self._run(program, binding, args, program.plan.extra_args(binding.shards))

    def _run(self, program: Program, binding: Binding, args: list[Any], extra: list[Any]) -> list[Any]:
        """Runs a program; keeps what is to stay gathered."""
        plan = program.plan
        taken = [*args, *extra]
        args.clear()  # the program frees what forward saved as it goes
        extra.clear()
        results = list(program.run(taken))
        program.record.runs += 1
        if staying := len(plan.kept) + len(plan.resharded):
            stayed, results = results[-staying:], results[:-staying]
            shards, active = binding.shards, self.engine.holdings.active
            for slot, full in zip(plan.kept, stayed, strict=False):
                shards[slot].stay(full)
                active.add(shards[slot].unit)
            for slot, shard in zip(plan.resharded, stayed[len(plan.kept) :], strict=True):
                shards[slot].stay_post_forward(shard)
                active.add(shards[slot].unit)
        return results

    def _run_backward(self, graph: MarkedGraph, args: list[Any]) -> Any:
        engine = self.engine
        binding = self._bind(graph, args)
        asked = self.calls.backward()
        engine.backward_runs(asked.entry.partial)
        undefined = _undefined(graph, asked.absent)
        dead = self._dead_outputs(graph, undefined, asked.inputs_only)
        split = engine.holdings.split_in(binding) if binding.parts else frozenset[Unit]()
        states = backward_states(engine.holdings, graph, binding, asked, dead, split)
        program = self._program(graph, binding, states, undefined if dead else frozenset(), asked.inputs_only)
        plan, shards = program.plan, binding.shards
        kept_from_us = [*plan.unreduced, *plan.again, *plan.local]
        shared = _storages(args) if kept_from_us else set()
        extra = plan.extra_args(shards)
        for slot in plan.dropped:  # now, so that the program frees them
            shards[slot].reshard()
        for slot, pending in plan.added:
            if pending:
                shards[slot].pending = None
            else:
                shards[slot].held = None
        for slot in plan.partial:
            shards[slot].partial = None
        results = self._run(program, binding, args, extra)
        for slot, position in kept_from_us:
            grad, results[position] = results[position], None
            self._take(shards[slot], grad, (slot, position), plan, not shared.isdisjoint(_storages([grad])))
            shared |= _storages([grad])
            engine.holdings.active.add(shards[slot].unit)
        if split:
            engine.holdings.end_split(split - asked.units_again)
        return results

    def _take(self, shard: Shard, grad: Tensor, place: tuple[int, int], plan: Plan, shared: bool) -> None:
        if place in plan.again:
            shard.add_pending(grad, shared)
        elif place in plan.local:
            shard.partial = grad.clone() if shared else grad
        else:
            shard.hold(grad, shared)

    def _dead_outputs(self, graph: MarkedGraph, undefined: frozenset[str], inputs_only: bool) -> frozenset[int]:
        """Positions of results that have no gradient when these tangents have none, or no parameter is to get one."""
        if not undefined and not inputs_only:
            return frozenset()
        key = (undefined, inputs_only)
        if key not in self._dead:
            self._dead[key] = frozenset(dead_outputs(graph.gm.graph, undefined, inputs_only))
        return self._dead[key]


def _undefined(graph: MarkedGraph, absent: Sequence[bool]) -> frozenset[str]:
    """Tangents without a gradient."""
    # Results that are views, or inputs that were written, have tangents too: then the zeros that AOTAutograd makes
    # stay zeros.
    if not any(absent) or len(absent) != len(graph.tangents):
        return frozenset()
    return frozenset(name for name, missing in zip(graph.tangents, absent, strict=True) if missing)


def _storages(values: Sequence[Any]) -> set[int]:
    """Addresses of the memory behind tensors."""
    return {value.untyped_storage().data_ptr() for value in values if isinstance(value, Tensor)}


def _inputs(graph: MarkedGraph, lowered: GraphModule) -> list[Any]:
    """Example inputs of a lowered graph: those of the marked one, then the fake values of what a pass has added."""
    added = [node for node in lowered.graph.nodes if node.op == "placeholder"][len(graph.inputs) :]
    return [*graph.inputs, *(node.meta["val"] for node in added)]


def _post_forward_ref(param: ParamRef) -> ParamRef:
    assert param.post_forward is not None
    count, _ = param.post_forward
    numel = math.prod(padded_shape(param.size, count, param.dim)) // count
    return replace(param, shard_numel=numel)
