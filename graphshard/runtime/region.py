"""A region: what Dynamo captured once, and the programs that are lowered from it on demand.

The flags that users flip between steps are read when a program is about to run, and choose it. A program that is
missing is lowered then from the marked graph, in the contexts of the first compilation; nothing is traced again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from graphshard.compat.autograd import a_stage_asks_for_inputs
from graphshard.compat.dynamo import boxed, uncaptured
from graphshard.compat.inductor import CompileState, copy_graph, keep_what_forward_saves, module_of
from graphshard.errors import UnsupportedModel
from graphshard.following.part_programs import PartPrograms
from graphshard.following.route import Leg
from graphshard.graph.block_calls import Body
from graphshard.graph.ir import Direction, output_args, reductions, shard_placeholder, unshards, val
from graphshard.graph.rewriting import placeholders_first
from graphshard.lowering import driver
from graphshard.lowering.bodies import Bodies
from graphshard.runtime.model_runtime import ModelRuntime
from graphshard.runtime.program_runner import ProgramRunner
from graphshard.runtime.program_selection import ProgramSelection
from graphshard.runtime.region_lowering import RegionLowering
from graphshard.runtime.symbolic import SizesDiffer
from graphshard.state.binding import Binding
from graphshard.state.call_state import forward_states
from graphshard.state.calls import BackwardRequest, Calls
from graphshard.state.marked_graph import BoxedCallable, MarkedGraph, SplitGraph, marked_graph, split_graph
from graphshard.state.shards import Shard
from graphshard.state.signatures import structure


class Region:
    """Everything that comes from one graph of Dynamo's.

    Dynamo keeps what it compiled as long as the code it compiled it for. That code belongs to the engine, so a region
    must not keep the engine's parts, or a shard, alive: a deleted model could never be freed.

    Args:
        runtime: of the model.
        number: of this region, for dumps and reports.
        positions: shards by their position among the graph's inputs.
        broken: whether the graph is known to be a part of what the user called: a graph break ends it, or Dynamo
            skipped the frame around.
        input_grads: how many inputs besides shards need a gradient.
        bodies: compiles what programs compute; None: they run as they are.
        patches: compiler configuration for programs that are compiled late.
    """

    def __init__(
        self,
        runtime: ModelRuntime,
        number: int,
        positions: dict[int, Shard],
        broken: bool,
        input_grads: int,
        bodies: Bodies | None,
        patches: dict[str, Any],
    ) -> None:
        self.number = number
        self._broken = broken
        self._input_grads = input_grads
        self._patches = patches
        self._split: SplitGraph | None = None
        self._traced: Sequence[Body] = ()
        self._planned: tuple[str, GraphModule] | None = None
        self._slot_named: dict[str, int] = {}
        self._lowering = RegionLowering(runtime, number, positions, bodies)
        self._runner = ProgramRunner(self._lowering)
        self._selection = ProgramSelection(self._lowering, broken)
        self.parts = PartPrograms(self._runner, self._lowering)
        self.calls = Calls(runtime.holdings.calls, runtime.holdings.split.units, number)

    # -- compilation

    def traced_once(self, bodies: Sequence[Body]) -> None:
        """Is told of what calls in its graphs stand for; its backward is compiled long after its forward."""
        self._traced = bodies

    def compile(self, gm: GraphModule, inputs: Sequence[Any], *, direction: Direction, **kwargs: Any) -> BoxedCallable:
        """Takes a graph of the region from the compiler's front end; returns what runs in its place."""
        runtime, planning = self._lowering.runtime, self._lowering.runtime.context.planning
        placeholders_first(gm.graph)
        gm = self._expanded(gm, direction)
        graph = marked_graph(gm, direction, inputs, kwargs, CompileState.capture(self._patches))
        self._lowering.check_slots(graph)
        self._check_gradients(gm)
        if planning is not None:
            planning.agree(runtime.context.consensus.waited)
        if direction == "backward":
            shards = self._lowering.binding(graph).shards
            runtime.follower.learn_backward(self._lowering.structure, (shards[slot].fqn for slot in graph.gathered))
            self._selection.backward_graph = graph
            self._lowering.guards.bind(inputs, backward=True)
            # Lowered when it first runs: only then it is known what the flags ask for.
            return boxed(partial(self._run_backward, graph))
        self._lowering.guards.bind(inputs)
        if direction == "forward":
            keep_what_forward_saves()
            self._slot_named = {name: slot for slot, (name, _) in enumerate(graph.slots)}
        # Forward must be compiled now: backward is traced with the strides that the compiler chose for what it saves.
        lowering, binding = self._lowering, self._lowering.binding(graph)
        is_whole, backward = runtime.follower.is_whole(self._broken), self._backward_to_come(direction)
        again = frozenset[int]() if backward is None else _gathered_again(graph, backward)
        lowering.structure_of = partial(structure, input_grads=self._input_grads, is_whole=is_whole, again=again)
        lowering.structure, lowering.is_whole = lowering.structure_of(binding), is_whole
        followed = runtime.follower.of_forward(graph.direction, binding, lowering.structure, self._broken, runs=False)
        lowering.leader = runtime.follower.leader
        if followed is not None:
            self.parts.lower_forward(graph, binding, followed)
            return boxed(lambda args: self._run_forward(graph, args))
        split = runtime.holdings.split.in_forward(binding.parts, self._broken)
        whole = runtime.prefetch.outside(graph, binding, split, not is_whole)
        if backward is not None and runtime.holdings.shards.is_whole(binding.unit_set):
            lowering.keep_units(graph, backward, binding)
        self._selection.program(graph, binding, forward_states(runtime.holdings, binding, whole), late=False)
        return boxed(lambda args: self._run_forward(graph, args))

    def _backward_to_come(self, direction: Direction) -> GraphModule | None:
        """The backward of a forward that is compiled, with blocks in the place of calls; None: there is none."""
        planning = self._lowering.runtime.context.planning
        backward = None if planning is None or direction != "forward" else planning.take_backward()
        if backward is None:
            return None
        text, backward = str(backward.graph), module_of(backward, copy_graph(backward))
        self._check_gradients(backward)
        self._planned = text, self._expanded(backward, "backward")
        return backward

    def _check_gradients(self, gm: GraphModule) -> None:
        for node in reductions(gm.graph):
            if val(node.all_input_nodes[0]).layout is not torch.strided:
                shard = self._lowering.shard_of(shard_placeholder(node).name)
                raise UnsupportedModel(
                    f"{'a parameter' if shard is None else shard.fqn}: its gradient is a sparse tensor, which neither "
                    "FSDP2 nor graphshard reduces; want sparse=False in its nn.Embedding"
                )

    def _expanded(self, gm: GraphModule, direction: Direction) -> GraphModule:
        """A graph with blocks in the place of calls: itself, changed; of a planned backward, what was made then."""
        if direction == "backward" and self._planned is not None:
            (text, planned), self._planned = self._planned, None
            if text == str(gm.graph):
                return planned
        context = self._lowering.runtime.context
        driver.expand(gm, f"{context.name}.region{self.number}.{direction}", context.report.note_once)
        return gm

    # -- run time

    def _run_forward(self, graph: MarkedGraph, args: list[Any]) -> Any:
        # Where other code of the forward has run, the call cannot be made again (see `ProgramRunner`).
        if not self._broken and (failed := self._lowering.guards.failed(args)):
            raise SizesDiffer(f"{failed}, and a call has others")
        runtime, binding = self._lowering.runtime, self._runner.bind(graph, args)
        holdings, follower = runtime.holdings, runtime.follower
        forward = holdings.forward
        forward.run_region()
        forward.touched.update(binding.units)
        known_by = self._lowering.structure_for(binding)
        followed = follower.of_forward(graph.direction, binding, known_by, self._broken)
        if followed is not None:
            holdings.gathers.finish_used(binding.units)
            forward.regions_run += 1
            if graph.direction == "forward":
                self.calls.begin(binding, forward.entry, follower.role)
            return self.parts.forward(graph, binding, args, followed)
        is_part = self._selection.is_part
        program = self._selection.before_forward(graph, binding)
        role = follower.runs(Leg(self._selection, known_by, graph, binding, program))
        if graph.direction == "forward":
            self.calls.begin(binding, forward.entry, role, is_part)
        return self._runner.forward(program, binding, args)

    @uncaptured
    def _run_backward(self, graph: MarkedGraph, args: list[Any]) -> Any:
        asked = self.calls.backward()
        backward = self._lowering.runtime.backward
        backward.runs(asked.entry.partial)
        binding = self._bind_saved(graph, args, asked.forward)
        self._lowering.runtime.holdings.shards.check_sent(binding.shards)
        if backward.deferred is None and asked.inputs_only and a_stage_asks_for_inputs():
            raise UnsupportedModel(
                f"{self._lowering.runtime.context.name}: a pipeline stage splits its backward, and its module only "
                "contains the compiled model, which would not be asked for its other half: want that module compiled, "
                "or `dw_builder=graphshard.weight_backward(model)`"
            )
        # A pipeline's schedule reduces gradients later; any other backward does all of its work at once.
        if backward.deferred is None or any(unit.reduce_grads for unit in binding.units):
            return self._run_asked(graph, args, asked)
        if self._split is None:
            self._split = split_graph(graph)
        split = self._split
        taken = [args[i] for i in split.taken]
        results = self._run_asked(split.inputs, args, asked)
        count = len(output_args(graph.gm.graph))
        later = BackwardRequest(asked.entry, asked.absent, forward=asked.forward, is_part=asked.is_part)
        backward.deferred.append(partial(self._run_weights, split.weights, [*taken, *results[count:]], later))
        return results[:count]

    def _bind_saved(self, graph: MarkedGraph, args: list[Any], forward: Binding | None) -> Binding:
        """The shards among what was saved for a backward. Where hooks of saved tensors hand back copies, as of what was
        offloaded, those of the `forward` take their place.
        """
        try:
            return self._runner.bind(graph, args)
        except KeyError:
            if forward is None:
                raise
        self._lowering.runtime.context.report.note_once(
            "hooks of saved tensors hand back copies of shards: backward takes the shards themselves"
        )
        for name, position in graph.slots:
            args[position] = forward.shards[self._slot_named[name]].leaf
        return self._runner.bind(graph, args)

    def _run_weights(self, graph: MarkedGraph, args: list[Any], asked: BackwardRequest) -> None:
        """The second half of a backward: outside autograd, so gradients are delivered here."""
        shards = self._runner.bind(graph, args).shards
        grads = self._run_asked(graph, args, asked)
        for slot, position in graph.reduced.items():
            if grads[position] is not None:
                shards[slot].deliver(grads[position])

    def _run_asked(self, graph: MarkedGraph, args: list[Any], asked: BackwardRequest) -> list[Any]:
        binding = self._runner.bind(graph, args)
        undefined = _undefined(graph, asked.absent)
        dead = self._selection.dead_outputs(graph, undefined, asked.inputs_only)
        if (followed := self._lowering.runtime.follower.of_backward(asked)) is not None:
            reached = undefined if dead else frozenset()
            return self.parts.backward(graph, binding, args, followed, asked, dead, reached)
        selected = self._selection.before_backward(graph, binding, asked, dead, undefined)
        results = self._runner.run(selected.program, binding, args)
        self._selection.behind_backward(selected)
        return results


def _gathered_again(forward: MarkedGraph, backward: GraphModule) -> frozenset[int]:
    """Slots of a forward that its backward gathers, too."""
    again = {shard_placeholder(node).name for node in unshards(backward.graph)}
    return frozenset(slot for slot, (name, _) in enumerate(forward.slots) if name in again)


def _undefined(graph: MarkedGraph, absent: Sequence[bool]) -> frozenset[str]:
    """Tangents without a gradient."""
    # Inputs that were written have tangents too: then the zeros that AOTAutograd makes stay zeros.
    if not any(absent) or len(absent) != len(graph.tangents):
        return frozenset()
    return frozenset(name for name, missing in zip(graph.tangents, absent, strict=True) if missing)
