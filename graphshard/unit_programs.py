"""Programs for a whole unit, outside any region: gathering by hand, and reducing what regions left unreduced.

They are lowered from small marked graphs by the same passes as a region's, one bucket each, and run operator by
operator.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from graphshard import driver
from graphshard.compat import fake_tensors
from graphshard.dispatch import REACHED, RESHARD, Binding, UnitState, make_plan
from graphshard.fsdp2 import Unit
from graphshard.ir import WAIT, Direction, PassContext, launch_counts
from graphshard.markers import REDUCE_GRAD, UNSHARD
from graphshard.printer import format_graph
from graphshard.report import ProgramRecord, Report
from graphshard.shards import PARTIAL, Shard


class Engine(Protocol):
    """What unit programs ask of the engine of their model."""

    name: str
    report: Report


class Gather:
    """A gather of one unit under way: launched, not awaited.

    Args:
        gm: lowered graph.
        args: shards.
    """

    def __init__(self, gm: GraphModule, args: Sequence[Tensor]) -> None:
        self._interpreter = Interpreter(gm)
        self._interpreter.args_iter = iter(args)
        self._todo = list(gm.graph.nodes)
        while self._todo and self._todo[0].target is not WAIT:
            self._step()

    def _step(self) -> Any:
        node = self._todo.pop(0)
        result = self._interpreter.env[node] = self._interpreter.run_node(node)
        return result

    def wait(self) -> Sequence[Tensor]:
        """The gathered parameters."""
        result: Sequence[Tensor] = ()
        while self._todo:
            result = self._step()
        return result


class UnitPrograms:
    """The unit programs of one model.

    Args:
        engine: of the model.
    """

    def __init__(self, engine: Engine) -> None:
        self._name = engine.name
        self._report = engine.report
        self._programs: dict[tuple[object, ...], tuple[GraphModule, ProgramRecord]] = {}

    def clear(self) -> None:
        """Forgets programs: parameters have changed."""
        self._programs.clear()

    @torch.no_grad()
    def launch_gather(self, shards: Sequence[Shard], record: ProgramRecord | None = None) -> Gather:
        """Launches the gather of some parameters of one unit; counts it in `record`, or in one of its own."""
        unit = shards[0].unit
        gm, own = self._program("unshard", shards, UnitState(unit.settings(), RESHARD, True, None, ()))
        (record or own).runs += 1
        return Gather(gm, [shard.leaf.detach() for shard in shards])

    @torch.no_grad()
    def reduce(self, unit: Unit, shards: Sequence[Shard], record: ProgramRecord | None = None) -> None:
        """Reduces what `shards`, of one unit, hold (zeros, where they hold nothing), and puts it on the parameters.

        Where the unit does not all-reduce, they hold what is reduced over the shards. Counts it in `record`, or in
        one of its own.
        """
        grads = [_held(shard) for shard in shards]
        bits = tuple(shard.bits & PARTIAL | REACHED for shard in shards)
        state = UnitState(unit.settings(), RESHARD, True, None, bits)
        gm, own = self._program("reduce", shards, state)
        partial = [shard.partial for shard in shards if shard.partial is not None]
        (record or own).runs += 1
        for shard in shards:
            shard.drop_grads()
        results: Sequence[Tensor] = gm(*grads, *(shard.leaf.detach() for shard in shards), *partial)
        for shard, result in zip(shards, results, strict=True):
            if state.settings.all_reduce:
                shard.param.deliver_grad(result)
            else:
                shard.partial = result

    def _program(self, kind: str, shards: Sequence[Shard], state: UnitState) -> tuple[GraphModule, ProgramRecord]:
        key = (kind, tuple(map(id, shards)), state)
        if key not in self._programs:
            self._programs[key] = self._lower(kind, shards, state)
        return self._programs[key]

    def _lower(self, kind: str, shards: Sequence[Shard], state: UnitState) -> tuple[GraphModule, ProgramRecord]:
        names = [f"shard_{i}" for i in range(len(shards))]
        gm = _marked(kind, shards, names)
        slots = range(len(shards))
        reduced = {slot: slot for slot in slots} if kind == "reduce" else {}
        gathered = frozenset[int]() if reduced else frozenset(slots)
        flags = make_plan(names, gathered, reduced, Binding(tuple(shards)), [state]).flags
        params = {name: shard.ref() for name, shard in zip(names, shards, strict=True)}
        direction: Direction = "backward" if reduced else "forward"
        start = time.perf_counter()
        title = f"{self._name}.{kind}.{shards[0].unit.name or 'root'}"
        lowered = driver.lower(gm, PassContext(direction, params, flags), title).gm
        record = ProgramRecord(
            -1,
            kind,
            str(flags),
            launch_counts(lowered.graph),
            time.perf_counter() - start,
            0.0,
            ir=format_graph(lowered.graph),
        )
        self._report.programs.append(record)
        return lowered, record


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
        with mode:
            leaf.meta["val"] = torch.empty(shard.leaf.shape, dtype=shard.leaf.dtype, device=shard.leaf.device)
    results = []
    for i, (leaf, shard) in enumerate(zip(leaves, shards, strict=True)):
        text = str(shard.spec())
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
