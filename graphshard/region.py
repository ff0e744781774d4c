"""A region: what Dynamo captured once, and the programs that are lowered from it on demand.

The flags that users flip between steps are read when a program is about to run, and choose it. A program that is
missing is lowered then from the marked graph, in the contexts of the first compilation; nothing is traced again.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.fx import GraphModule

from graphshard import driver
from graphshard.compat import CompileState, boxed, compiled_function_node, generated_code, keeps_graph
from graphshard.errors import UnsupportedModel
from graphshard.ir import (
    LAUNCHES,
    Direction,
    Flags,
    PassContext,
    launches,
    output_args,
    reductions,
    shard_placeholder,
    unshards,
)
from graphshard.passes.apply_flags import dead_outputs, is_tangent
from graphshard.printer import format_graph
from graphshard.report import ProgramRecord, Report
from graphshard.shards import Shard

BoxedCallable = Callable[[list[Any]], Any]
# Compiles a lowered graph: (graph, example inputs, the compiler's own arguments) -> code.
CompileGraph = Callable[[GraphModule, Sequence[Any], dict[str, Any]], BoxedCallable]


class Engine(Protocol):
    """What a region asks of the engine of its model."""

    name: str
    report: Report
    shard_at: dict[int, Shard]
    bindings: dict[tuple[int, str, tuple[int, ...]], Binding]

    def backward_runs(self) -> None:
        """Is told that a backward program runs."""


class Binding:
    """The shards that one call of a region brings, in slot order, and their grouping into units.

    Equal blocks share a region; `grouping` says whether they also share a program: (ordinal of the unit, index in it)
    per slot.
    """

    def __init__(self, shards: tuple[Shard, ...]) -> None:
        ordinals: dict[int, int] = {}
        self.shards = shards
        self.grouping = tuple((ordinals.setdefault(id(shard.unit), len(ordinals)), shard.index) for shard in shards)
        self.units = list({id(shard.unit): shard.unit for shard in shards}.values())


@dataclass
class MarkedGraph:
    """One graph of a region, with markers.

    Attributes:
        slots: (placeholder of a shard, its position among the arguments), in argument order.
        reduced: (slot, position among the results) of each reduced gradient.
        tangents: placeholders of the gradients of outputs.
        kwargs: what the compiler gave along.
    """

    direction: Direction
    gm: GraphModule
    inputs: list[Any]
    slots: list[tuple[str, int]]
    reduced: list[tuple[int, int]]
    tangents: list[str]
    kwargs: dict[str, Any]
    state: CompileState


@dataclass
class Program:
    """Compiled code for one graph, grouping and run-time state."""

    run: BoxedCallable
    record: ProgramRecord


class Region:
    """Everything that comes from one graph of Dynamo's.

    Dynamo keeps what it compiled as long as the code it compiled it for. That code belongs to the engine, so a region
    must not keep the engine, or a shard, alive: a deleted model could never be freed.

    Args:
        engine: of the model.
        number: of this region, for dumps and reports.
        positions: shards by their position among the graph's inputs.
        num_inputs: number of these inputs.
        compile_graph: makes code of a lowered graph.
        patches: compiler configuration for programs that are compiled late.
    """

    def __init__(
        self,
        engine: Engine,
        number: int,
        positions: dict[int, Shard],
        num_inputs: int,
        compile_graph: CompileGraph,
        patches: dict[str, Any],
    ) -> None:
        self._engine = weakref.ref(engine)
        self.number = number
        self._positions = {position: weakref.ref(shard) for position, shard in positions.items()}
        self._num_inputs = num_inputs
        self._compile_graph = compile_graph
        self._patches = patches
        self._names: dict[str, int] = {}  # placeholder of a shard -> its position among the region's inputs
        self._programs: dict[tuple[object, ...], Program] = {}
        self._dead: dict[frozenset[str], tuple[int, ...]] = {}
        self._local = threading.local()  # autograd runs a device's backward in a thread of its own

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
        slots = self._slots(gm, direction)
        slot_of = {name: slot for slot, (name, _) in enumerate(slots)}
        owners = {node: slot_of[shard_placeholder(node).name] for node in reductions(gm.graph)}
        graph = MarkedGraph(
            direction,
            gm,
            list(inputs),
            slots,
            [(owners[result], i) for i, result in enumerate(output_args(gm.graph)) if result in owners],
            [node.name for node in gm.graph.nodes if is_tangent(node)],
            kwargs,
            CompileState.capture(self._patches),
        )
        if direction == "backward":
            # Lowered when it first runs: only then it is known what the flags ask for.
            return boxed(lambda args: self._run_backward(graph, args))
        # Forward must be compiled now: backward is traced with the strides that the compiler chose for what it saves.
        shards = [self._positions[self._names[name]]() for name, _ in graph.slots]
        self._program(graph, Binding(tuple(shard for shard in shards if shard is not None)), Flags(), late=False)
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

    def _program(self, graph: MarkedGraph, binding: Binding, flags: Flags, late: bool = True) -> Program:
        key = (graph.direction, binding.grouping, flags)
        if (program := self._programs.get(key)) is None:
            program = self._programs[key] = self._lower(graph, binding, flags, late)
        return program

    def _lower(self, graph: MarkedGraph, binding: Binding, flags: Flags, late: bool) -> Program:
        params = {name: shard.ref() for (name, _), shard in zip(graph.slots, binding.shards, strict=True)}
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
        return Program(run, record)

    # -- run time

    def watch(self, results: Sequence[Any]) -> None:
        """Watches the autograd node behind a call's results, for what backward must know of it."""
        outputs = [t for t in results if isinstance(t, Tensor) and t.requires_grad and t.grad_fn is not None]
        node = next((found for t in outputs if (found := compiled_function_node(t)) is not None), None)
        if node is not None:
            numbers = sorted({t.output_nr for t in outputs if t.grad_fn is node})
            node.register_prehook(lambda grads: self._before_backward(grads, numbers))

    def _before_backward(self, grads: Sequence[Tensor | None], numbers: list[int]) -> None:
        if keeps_graph():
            raise RuntimeError(
                f"backward: got retain_graph=True or create_graph=True for compiled region {self.number}, "
                "which frees what forward saved. "
                "Add the losses and call backward once, or run this model under `with graphshard.eager(model):`"
            )
        self._local.undefined = [grads[i] is None for i in numbers]

    def _bind(self, graph: MarkedGraph, args: list[Any]) -> Binding:
        engine = self.engine
        addresses = tuple(args[position].data_ptr() for _, position in graph.slots)
        key = (self.number, graph.direction, addresses)
        if (binding := engine.bindings.get(key)) is None:
            binding = engine.bindings[key] = Binding(tuple(engine.shard_at[address] for address in addresses))
        return binding

    def _run_forward(self, graph: MarkedGraph, args: list[Any]) -> Any:
        program = self._program(graph, self._bind(graph, args), Flags())
        program.record.runs += 1
        return program.run(args)

    def _run_backward(self, graph: MarkedGraph, args: list[Any]) -> Any:
        binding = self._bind(graph, args)
        self.engine.backward_runs()
        unreduced: dict[Shard, int] = {}  # -> position among the results
        held: dict[Shard, str] = {}  # -> placeholder of the shard
        undefined = self._undefined(graph)
        dead = self._dead_outputs(graph, undefined)
        if not all(unit.reduce_grads for unit in binding.units) or any(
            shard.held is not None for shard in binding.shards
        ):
            for slot, position in graph.reduced:
                shard = binding.shards[slot]
                if position not in dead and not shard.unit.reduce_grads:
                    unreduced[shard] = position
                elif position not in dead and shard.held is not None:
                    held[shard] = graph.slots[slot][0]
        flags = Flags(
            frozenset(name for slot, (name, _) in enumerate(graph.slots) if binding.shards[slot] in unreduced),
            tuple(held.values()),
            undefined if dead else frozenset(),
        )
        program = self._program(graph, binding, flags)
        shared = _storages(args) if unreduced else set()
        taken = [*args, *(shard.held for shard in held)]
        args.clear()  # the program frees what forward saved as it goes
        results = list(program.run(taken))
        program.record.runs += 1
        for shard in held:
            shard.held = None
        for shard, position in unreduced.items():
            grad, results[position] = results[position], None
            shard.hold(grad, shared=not shared.isdisjoint(_storages([grad])))
            shared |= _storages([grad])
        return results

    def _undefined(self, graph: MarkedGraph) -> frozenset[str]:
        """Tangents without a gradient in this call, as the hook has seen them just before."""
        missing: list[bool] = self._local.__dict__.pop("undefined", [])
        # Results that are views, or inputs that were written, have tangents too: then the zeros that AOTAutograd makes
        # stay zeros.
        if not any(missing) or len(missing) != len(graph.tangents):
            return frozenset()
        return frozenset(name for name, absent in zip(graph.tangents, missing, strict=True) if absent)

    def _dead_outputs(self, graph: MarkedGraph, undefined: frozenset[str]) -> tuple[int, ...]:
        """Positions of results that have no gradient when these tangents have none."""
        if not undefined:
            return ()
        if undefined not in self._dead:
            self._dead[undefined] = dead_outputs(graph.gm.graph, undefined)
        return self._dead[undefined]


def _storages(values: Sequence[Any]) -> set[int]:
    """Addresses of the memory behind tensors."""
    return {value.untyped_storage().data_ptr() for value in values if isinstance(value, Tensor)}


def _inputs(graph: MarkedGraph, lowered: GraphModule) -> list[Any]:
    """Example inputs of a lowered graph: those of the marked one, then the fake values of what a pass has added."""
    added = [node for node in lowered.graph.nodes if node.op == "placeholder"][len(graph.inputs) :]
    return [*graph.inputs, *(node.meta["val"] for node in added)]
