"""A region: what Dynamo captured once, and the programs that are lowered from it on demand.

The flags that users flip between steps are read when a program is about to run, and choose it. A program that is missing is lowered then
from the marked graph, in the contexts of the first compilation; nothing is traced again.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.fx import GraphModule

from graphshard import driver
from graphshard.compat import CompileState, compiled_function_node, keeps_graph
from graphshard.errors import UnsupportedModel
from graphshard.ir import Direction, Flags, PassContext, launches, output_args, reductions, shard_placeholder, unshards
from graphshard.ir import LAUNCHES as LAUNCH_KINDS
from graphshard.passes.apply_flags import dead_outputs, is_tangent
from graphshard.report import ProgramRecord, Report
from graphshard.shards import Shard

BoxedCallable = Callable[[list[Any]], Any]
# Compiles a lowered graph: (graph, example inputs, the compiler's own arguments) -> code.
CompileGraph = Callable[[GraphModule, Sequence[Any], dict[str, Any]], BoxedCallable]


class Engine(Protocol):
    """What a region asks of the engine of its model."""

    report: Report
    shard_at: dict[int, Shard]

    def backward_runs(self) -> None:
        """Is told that a backward program runs."""


@dataclass(frozen=True)
class Binding:
    """The shards that one call of a region brings, in slot order, and their grouping into units.

    Equal blocks share a region; `grouping` says whether they also share a program: (ordinal of the unit, index in it) per slot.
    """

    shards: tuple[Shard, ...]
    grouping: tuple[tuple[int, int], ...]


@dataclass
class MarkedGraph:
    """One graph of a region, with markers.

    Attributes:
        slots: (placeholder of a shard, its position among the arguments), in argument order.
        kwargs: what the compiler gave along.
    """

    direction: Direction
    gm: GraphModule
    inputs: list[Any]
    slots: list[tuple[str, int]]
    kwargs: dict[str, Any]
    state: CompileState


@dataclass
class Program:
    """Compiled code for one graph, grouping and run-time state."""

    run: BoxedCallable
    record: ProgramRecord


class Region:
    """Everything that comes from one graph of Dynamo's.

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
        self.engine = engine
        self.number = number
        self._positions = positions
        self._num_inputs = num_inputs
        self._compile_graph = compile_graph
        self._patches = patches
        self._names: dict[str, int] = {}  # placeholder of a shard -> its position among the region's inputs
        self._bindings: dict[tuple[str, tuple[int, ...]], Binding] = {}
        self._programs: dict[tuple[object, ...], Program] = {}
        self._backward: MarkedGraph | None = None
        self._local = threading.local()  # autograd runs a device's backward in a thread of its own

    def forget_bindings(self) -> None:
        """Is told that leaves were made anew: addresses mean nothing any more."""
        self._bindings.clear()

    # -- compilation

    def compile(self, gm: GraphModule, inputs: Sequence[Any], *, direction: Direction, **kwargs: Any) -> BoxedCallable:
        """Takes a graph of the region from the compiler's front end; returns what runs in its place."""
        graph = MarkedGraph(
            direction, gm, list(inputs), self._slots(gm, direction), kwargs, CompileState.capture(self._patches)
        )
        if direction == "backward":
            # Lowered when it first runs: only then it is known what the flags ask for.
            self._backward = graph
            return _boxed(lambda args: self._run_backward(graph, args))
        # Forward must be compiled now: backward is traced with the strides that the compiler chose for what it saves.
        shards = tuple(self._positions[position] for _, position in graph.slots)
        self._program(graph, _bind(shards), Flags(), late=False)
        return _boxed(lambda args: self._run_forward(graph, args))

    def _slots(self, gm: GraphModule, direction: Direction) -> list[tuple[str, int]]:
        names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
        markers = [*unshards(gm.graph), *reductions(gm.graph)]
        wanted = {shard_placeholder(marker).name for marker in markers}
        if direction != "backward":
            if len(names) != self._num_inputs:
                raise UnsupportedModel(
                    f"region {self.number}: AOTAutograd made {len(names)} inputs of {self._num_inputs}; "
                    "run this model with `graphshard.eager(model)` and report it"
                )
            self._names = {name: position for position, name in enumerate(names)}
        slots = []
        for position, name in enumerate(names):
            if name in wanted:
                if self._names.get(name) not in self._positions:
                    raise UnsupportedModel(f"region {self.number}: %{name} is gathered but is no sharded parameter")
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
        title = f"region{self.number}.{number}.{graph.direction}"
        lowered = driver.lower(graph.gm, PassContext(graph.direction, params, flags), title)
        inputs = _inputs(graph, lowered.gm)
        start = time.perf_counter()
        if late:
            with graph.state.resumed():
                run = self._compile_graph(lowered.gm, inputs, graph.kwargs)
        else:
            run = self._compile_graph(lowered.gm, inputs, graph.kwargs)
        counts = Counter(LAUNCH_KINDS[node.target] for node in launches(lowered.gm.graph))
        record = ProgramRecord(
            self.number, graph.direction, str(flags), dict(counts), lowered.passes_s, time.perf_counter() - start
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
                f"backward: got retain_graph=True or create_graph=True for compiled region {self.number}, which frees what forward saved. "
                "Add the losses and call backward once, or run this model under `with graphshard.eager(model):`"
            )
        self._local.undefined = [grads[i] is None for i in numbers]

    def _bind(self, graph: MarkedGraph, args: list[Any]) -> Binding:
        addresses = tuple(args[position].data_ptr() for _, position in graph.slots)
        key = (graph.direction, addresses)
        if (binding := self._bindings.get(key)) is None:
            binding = self._bindings[key] = _bind(tuple(self.engine.shard_at[address] for address in addresses))
        return binding

    def _run_forward(self, graph: MarkedGraph, args: list[Any]) -> Any:
        program = self._program(graph, self._bind(graph, args), Flags())
        program.record.runs += 1
        return program.run(args)

    def _run_backward(self, graph: MarkedGraph, args: list[Any]) -> Any:
        binding = self._bind(graph, args)
        undefined = self._undefined(graph)
        dead = dead_outputs(graph.gm.graph, undefined) if undefined else ()
        by_name = {name: shard for (name, _), shard in zip(graph.slots, binding.shards, strict=True)}
        reduced = {
            shard_placeholder(result).name: position
            for position, result in enumerate(output_args(graph.gm.graph))
            if result in set(reductions(graph.gm.graph)) and position not in dead
        }
        unreduced = frozenset(name for name in reduced if not by_name[name].unit.reduce_grads)
        held = tuple(name for name in reduced if name not in unreduced and by_name[name].held is not None)
        flags = Flags(unreduced, held, undefined if dead else frozenset())
        program = self._program(graph, binding, flags)
        self.engine.backward_runs()
        addresses = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)} if unreduced else set()
        results = list(program.run([*args, *(by_name[name].held for name in held)]))
        args.clear()
        program.record.runs += 1
        for name in held:
            by_name[name].held = None
        for name in unreduced:
            grad = results[reduced[name]]
            address = grad.untyped_storage().data_ptr()
            by_name[name].hold(grad, shared=address in addresses)
            addresses.add(address)
            results[reduced[name]] = None
        return results

    def _undefined(self, graph: MarkedGraph) -> frozenset[str]:
        """Tangents without a gradient in this call."""
        undefined: list[bool] = self._local.__dict__.pop("undefined", [])
        tangents = [node.name for node in graph.gm.graph.nodes if is_tangent(node)]
        # Results that are views, or inputs that were written, have tangents too: then the zeros that AOTAutograd makes stay zeros.
        if not any(undefined) or len(undefined) != len(tangents):
            return frozenset()
        return frozenset(name for name, missing in zip(tangents, undefined, strict=True) if missing)


def _bind(shards: tuple[Shard, ...]) -> Binding:
    ordinals: dict[int, int] = {}
    grouping = tuple((ordinals.setdefault(id(shard.unit), len(ordinals)), shard.index) for shard in shards)
    return Binding(shards, grouping)


def _inputs(graph: MarkedGraph, lowered: GraphModule) -> list[Any]:
    """Example inputs of a lowered graph: those of the marked one, then the fake values of what a pass has added."""
    added = [node for node in lowered.graph.nodes if node.op == "placeholder"][len(graph.inputs) :]
    return [*graph.inputs, *(node.meta["val"] for node in added)]


def _boxed(run: BoxedCallable) -> BoxedCallable:
    run._boxed_call = True  # type: ignore[attr-defined]
    return run
