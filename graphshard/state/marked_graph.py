"""One graph of a region, with markers, and the programs that are lowered from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from graphshard.agree.contract import Contract
from graphshard.compat.inductor import CompileState
from graphshard.graph.ir import Direction, Flags, is_tangent, output_args, reductions, shard_placeholder, unshards
from graphshard.graph.split_backward import split_backward
from graphshard.reporting.report import ProgramRecord
from graphshard.state.calling_convention import CallingConvention

BoxedCallable = Callable[[list[Any]], Any]


@dataclass
class MarkedGraph:
    """One graph of a region, with markers.

    Attributes:
        part: ``"inputs"`` or ``"weights"`` for half a backward graph, else ``""``.
        slots: (placeholder of a shard, its position among the arguments), in argument order.
        gathered: slots that are gathered.
        gather_order: the same slots, in the order of their gathers.
        reduced: slot -> position among the results of its reduced gradient.
        last_reduced: the slot whose gradient is reduced last, None if none is.
        tangents: placeholders of the gradients of outputs.
        kwargs: what the compiler gave along.
        state: of the compilation; None: nothing is compiled.
        num_results: that the compiler's front end knows of.
    """

    direction: Direction
    part: str
    gm: GraphModule
    inputs: list[Any]
    slots: list[tuple[str, int]]
    gathered: frozenset[int]
    gather_order: tuple[int, ...]
    reduced: dict[int, int]
    last_reduced: int | None
    tangents: list[str]
    kwargs: dict[str, Any]
    state: CompileState | None
    num_results: int

    def sends_nothing(self, flags: Flags) -> bool:
        """Whether all that a program gathers comes as arguments, and all that it reduces is handed out."""
        gathered = {self.slots[slot][0] for slot in self.gathered}
        reduced = set[str]() if flags.inputs_only else {self.slots[slot][0] for slot in self.reduced}
        return gathered <= set(flags.resident) and reduced <= flags.unreduced


@dataclass
class Program:
    """Compiled code for one graph, grouping and run-time state.

    Attributes:
        run: the code.
        record: of it.
        convention: its extra arguments and results.
        contract: that all ranks have for it; None: it has no peers.
        for_any_size: makes code of the same, not compiled, for sizes that `run` is not made for; None: there are none.
    """

    run: BoxedCallable
    record: ProgramRecord
    convention: CallingConvention
    contract: Contract | None = None
    for_any_size: Callable[[], BoxedCallable] | None = None


@dataclass
class SplitGraph:
    """Halves of a backward graph (see `split_backward`); `taken`: positions of the arguments of `weights`."""

    inputs: MarkedGraph
    weights: MarkedGraph
    taken: tuple[int, ...]


def marked_graph(
    gm: GraphModule,
    direction: Direction,
    inputs: Sequence[Any],
    kwargs: dict[str, Any],
    state: CompileState | None,
    part: str = "",
    num_results: int | None = None,
) -> MarkedGraph:
    """Reads the markers of a graph."""
    markers = [*unshards(gm.graph), *reductions(gm.graph)]
    wanted = {shard_placeholder(marker).name for marker in markers}
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    slots = [(name, position) for position, name in enumerate(names) if name in wanted]
    slot_of = {name: slot for slot, (name, _) in enumerate(slots)}
    gathers = [slot_of[shard_placeholder(node).name] for node in unshards(gm.graph)]
    owners = {node: slot_of[shard_placeholder(node).name] for node in reductions(gm.graph)}
    return MarkedGraph(
        direction,
        part,
        gm,
        list(inputs),
        slots,
        frozenset(gathers),
        tuple(dict.fromkeys(gathers)),
        {owners[result]: i for i, result in enumerate(output_args(gm.graph)) if result in owners},
        list(owners.values())[-1] if owners else None,
        [node.name for node in gm.graph.nodes if is_tangent(node)],
        kwargs,
        state,
        len(output_args(gm.graph)) if num_results is None else num_results,
    )


def split_graph(graph: MarkedGraph) -> SplitGraph:
    """Splits a backward graph."""
    halves = split_backward(graph.gm)
    handed = [node.meta["val"] for node in halves.weights.graph.nodes if node.op == "placeholder"][len(halves.taken) :]
    weights_inputs = [*(graph.inputs[i] for i in halves.taken), *handed]
    # Positions of arguments mean something else in the second half.
    kwargs = {name: () if name == "static_input_idxs" else value for name, value in graph.kwargs.items()}
    return SplitGraph(
        marked_graph(halves.inputs, graph.direction, graph.inputs, graph.kwargs, graph.state, "inputs"),
        marked_graph(halves.weights, graph.direction, weights_inputs, kwargs, graph.state, "weights"),
        halves.taken,
    )
