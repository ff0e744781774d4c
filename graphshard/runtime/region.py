"""A region: what Dynamo captured once, and the programs that are lowered from it on demand.

The flags that users flip between steps are read when a program is about to run, and choose it. A program that is
missing is lowered then from the marked graph, in the contexts of the first compilation; nothing is traced again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor
from torch.fx import GraphModule

from graphshard.agree.consensus import Contracts
from graphshard.agree.executed import Executed
from graphshard.compat.dynamo import boxed
from graphshard.compat.inductor import CompileState
from graphshard.faults import run_program
from graphshard.following.followed import Followed
from graphshard.following.follower import Follower
from graphshard.following.route import Leg
from graphshard.fsdp2 import Unit
from graphshard.graph.ir import (
    Direction,
    output_args,
)
from graphshard.planning.planning import Planning
from graphshard.reporting.report import Report
from graphshard.runtime.prefetch import Prefetch
from graphshard.runtime.region_programs import CompileGraph, RegionPrograms
from graphshard.runtime.turns import Turns
from graphshard.state.calls import Backward, Calls
from graphshard.state.dispatch import Binding, Plan
from graphshard.state.holdings import Holdings
from graphshard.state.marked_graph import BoxedCallable, MarkedGraph, Program, SplitGraph, marked_graph, split_graph
from graphshard.state.shards import Shard
from graphshard.state.signatures import structure
from graphshard.state.states import forward_states


class Engine(Protocol):
    """What a region asks of the engine of its model."""

    name: str
    report: Report
    planning: Planning | None
    shard_at: dict[int, Shard]
    bindings: dict[tuple[int, str, tuple[int, ...]], Binding]
    holdings: Holdings
    prefetch: Prefetch
    contracts: Contracts
    follower: Follower
    executed: Executed | None
    deferred: list[Callable[[], None]] | None

    def is_whole(self, units: frozenset[Unit]) -> bool:
        """Whether `units` are all of the model's that have parameters."""

    def backward_runs(self, only: frozenset[Unit] = frozenset()) -> None:
        """Is told that a backward program runs, which ends the backward of `only` these units, or of all."""


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
        input_grads: how many inputs besides shards need a gradient.
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
        input_grads: int,
        compile_graph: CompileGraph,
        patches: dict[str, Any],
    ) -> None:
        self.number = number
        self._broken = broken
        self._input_grads = input_grads
        self._patches = patches
        self._split: SplitGraph | None = None
        self._made: RegionPrograms[Engine] = RegionPrograms(engine, number, positions, num_inputs, compile_graph)
        self._turns = Turns(self._made, broken)
        self._followed = Followed(self, self._made)
        self.calls = Calls(engine.holdings.calls, engine.holdings.split, number)

    @property
    def engine(self) -> Engine:
        """The engine of the model; raises as that of `RegionPrograms`."""
        return self._made.engine

    # -- compilation

    def compile(self, gm: GraphModule, inputs: Sequence[Any], *, direction: Direction, **kwargs: Any) -> BoxedCallable:
        """Takes a graph of the region from the compiler's front end; returns what runs in its place."""
        engine = self.engine
        graph = marked_graph(gm, direction, inputs, kwargs, CompileState.capture(self._patches))
        self._made.check_slots(graph)
        if engine.planning is not None:
            engine.planning.agree()
        if direction == "backward":
            shards = self._made.binding(graph).shards
            engine.follower.learn_backward(self._made.structure, (shards[slot].fqn for slot in graph.gathered))
            self._turns.backward_graph = graph
            # Lowered when it first runs: only then it is known what the flags ask for.
            return boxed(lambda args: self._run_backward(graph, args))
        # Forward must be compiled now: backward is traced with the strides that the compiler chose for what it saves.
        made, binding = self._made, self._made.binding(graph)
        is_whole = engine.follower.is_whole(self._broken)
        made.structure_of = partial(structure, input_grads=self._input_grads, is_whole=is_whole)
        made.structure = made.structure_of(binding)
        following = engine.follower.of_forward(graph.direction, binding, made.structure, self._broken, runs=False)
        made.leader = engine.follower.leader
        if following is not None:
            self._followed.lower_forward(graph, binding, following)
            return boxed(lambda args: self._run_forward(graph, args))
        whole = engine.holdings.wanted_whole(binding.parts, self._broken) | engine.prefetch.outside(binding)
        if engine.planning is not None and direction == "forward":
            backward = engine.planning.take_backward()
            if backward is not None and engine.is_whole(binding.unit_set):
                made.keep_units(graph, backward, binding)
        self._turns.program(graph, binding, forward_states(engine.holdings, binding, whole), late=False)
        return boxed(lambda args: self._run_forward(graph, args))

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
        holdings, follower = self.engine.holdings, self.engine.follower
        holdings.touched.update(binding.units)
        following = follower.of_forward(graph.direction, binding, self._made.structure, self._broken)
        if following is not None:
            holdings.finish_gathers(binding.units)
            holdings.regions_run += 1
            if graph.direction == "forward":
                self.calls.begin(binding, holdings.entry, follower.role)
            return self._followed.forward(graph, binding, args, following)
        program = self._turns.before_forward(graph, binding)
        role = follower.runs(Leg(self._turns, self._made.structure, graph, binding, program))
        if graph.direction == "forward":
            self.calls.begin(binding, holdings.entry, role)
        extra = program.plan.extra_args(binding.shards)
        for slot in program.plan.dropped:
            if binding.shards[slot].is_for_one_program:
                binding.shards[slot].reshard()
        return self._run(program, binding, args, extra)

    def _run(self, program: Program, binding: Binding, args: list[Any], extra: list[Any]) -> list[Any]:
        """Runs a program; keeps what is to stay gathered."""
        plan = program.plan
        taken = [*args, *extra]
        args.clear()  # the program frees what forward saved as it goes
        extra.clear()
        results = list(run_program(self.engine.name, program.record, program.run, taken, binding.shards))
        program.record.runs += 1
        if (executed := self.engine.executed) is not None:
            executed.ran(program.record, binding.shards)
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
        asked = self.calls.backward()
        self.engine.backward_runs(asked.entry.partial)
        deferred = self.engine.deferred
        # A pipeline's schedule reduces gradients later; any other backward does all of its work at once.
        if deferred is None or any(unit.reduce_grads for unit in self._bind(graph, args).units):
            return self._run_asked(graph, args, asked)
        if self._split is None:
            self._split = split_graph(graph)
        split = self._split
        taken = [args[i] for i in split.taken]
        results = self._run_asked(split.inputs, args, asked)
        count = len(output_args(graph.gm.graph))
        later = Backward(asked.entry, asked.absent)
        deferred.append(partial(self._run_weights, split.weights, [*taken, *results[count:]], later))
        return results[:count]

    def _run_weights(self, graph: MarkedGraph, args: list[Any], asked: Backward) -> None:
        """The second half of a backward: outside autograd, so gradients are delivered here."""
        shards = self._bind(graph, args).shards
        grads = self._run_asked(graph, args, asked)
        for slot, position in graph.reduced.items():
            if grads[position] is not None:
                shards[slot].param.deliver_grad(grads[position])

    def _run_asked(self, graph: MarkedGraph, args: list[Any], asked: Backward) -> list[Any]:
        engine = self.engine
        binding = self._bind(graph, args)
        undefined = _undefined(graph, asked.absent)
        dead = self._turns.dead_outputs(graph, undefined, asked.inputs_only)
        if (following := engine.follower.of_backward(asked)) is not None:
            reached = undefined if dead else frozenset()
            return self._followed.backward(graph, binding, args, following, asked, dead, reached)
        turn = self._turns.before_backward(graph, binding, asked, dead, undefined)
        results = self.run(turn.program, binding, args)
        self._turns.behind_backward(turn)
        return results

    @property
    def followed(self) -> Followed:
        """Its programs as parts of a whole call."""
        return self._followed

    @property
    def holdings(self) -> Holdings:
        """Of the model."""
        return self.engine.holdings

    def run(self, program: Program, binding: Binding, args: list[Any]) -> list[Any]:
        """Runs a program with what shards hold; takes what it leaves unreduced."""
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
            self.engine.holdings.active.add(shards[slot].unit)
        return results

    def _take(self, shard: Shard, grad: Tensor, place: tuple[int, int], plan: Plan, shared: bool) -> None:
        if place in plan.again:
            shard.add_pending(grad, shared)
        elif place in plan.local:
            shard.partial = grad.clone() if shared else grad
        else:
            shard.hold(grad, shared)


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
