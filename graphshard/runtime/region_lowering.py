"""Lowers the programs of one region, with the collectives that all ranks have agreed on."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch.fx import Graph, GraphModule

from graphshard.agree.contract import Contract, contract_of
from graphshard.compat.dispatch import without_alias_check
from graphshard.compat.inductor import argument_position, generated_code
from graphshard.compat.interpreter import roomy, without_collection
from graphshard.compat.late_guards import LateGuards
from graphshard.compat.results import hide_results
from graphshard.compat.structured_trace import TracedCompile
from graphshard.errors import ModelDeleted, UnsupportedModel, VerifyError
from graphshard.faults import compiling
from graphshard.following.follower import KEPT
from graphshard.graph.gather_outputs import with_gather_outputs
from graphshard.graph.ir import (
    Direction,
    PassContext,
    launch_counts,
    output_args,
    reductions,
    shard_placeholder,
    unshards,
)
from graphshard.graph.plan import Decision
from graphshard.graph.printer import format_graph
from graphshard.graph.unit_ranges import operators_of_units
from graphshard.kernels import fuses_on
from graphshard.lowering import driver
from graphshard.lowering.bodies import Bodies
from graphshard.lowering.driver import Lowered
from graphshard.lowering.within_budget import lower_within_budget
from graphshard.passes.apply_residency import REJOINED
from graphshard.plan_file import PlanMismatch, program_flags
from graphshard.planner import BudgetTooSmall, RegionRun
from graphshard.planning.planned_programs import explained_text
from graphshard.planning.planning import RegionPlanning
from graphshard.reporting.artifacts import show_program
from graphshard.reporting.measuring import communication_facts
from graphshard.reporting.report import ProgramRecord
from graphshard.runtime.model_runtime import ModelRuntime
from graphshard.runtime.plain_code import for_any_size, plain_code
from graphshard.state.binding import Binding
from graphshard.state.calling_convention import CallingConvention, post_forward_ref, usual_flags
from graphshard.state.marked_graph import BoxedCallable, MarkedGraph, Program
from graphshard.state.shards import Shard
from graphshard.state.signatures import contract_params, ordered_units, program_key, shown_state

log = logging.getLogger(__name__)


class RegionLowering:
    """Makes the programs of one region.

    Args:
        runtime: of the model; it is not kept alive.
        number: of the region.
        positions: shards by their position among the region's inputs; not kept alive either.
        bodies: compiles what programs compute; None: they run as they are.

    Attributes:
        structure_of: tells by which structure other ranks know its programs (see `signatures`).
        structure: of the forward that it was captured in.
        is_whole: whether that was all of what the user called.
        leader: the rank that decides its contracts; None: the lowest.
        guards: what its late programs take for granted.
    """

    def __init__(self, runtime: ModelRuntime, number: int, positions: dict[int, Shard], bodies: Bodies | None) -> None:
        self._runtime = weakref.ref(runtime)
        self.guards = LateGuards(lambda said: self.runtime.capture_each_size(said))
        self.number = number
        self._positions = {position: weakref.ref(shard) for position, shard in positions.items()}
        self._bodies = bodies
        self._names: dict[str, int] = {}  # placeholder of a shard -> its position among the region's inputs
        self.structure = ""
        self._structures: dict[object, str] = {}
        self.structure_of: Callable[[Binding], str] = lambda binding: ""
        self.is_whole = True
        self.leader: int | None = None
        self._traced = TracedCompile.running()
        self._expects = True  # that the leader decides what this rank would
        planning, note = runtime.context.planning, runtime.context.report.note_once
        self._planner = None if planning is None else RegionPlanning(planning, number, note)

    @property
    def runtime(self) -> ModelRuntime:
        """The parts that run the model.

        Raises:
            ModelDeleted: a backward was still to come.
        """
        if (runtime := self._runtime()) is None:
            raise ModelDeleted("backward")
        return runtime

    def binding(self, graph: MarkedGraph) -> Binding:
        """The shards that the region was captured with."""
        found = [self.shard_of(name) for name, _ in graph.slots]
        return Binding(tuple(shard for shard in found if shard is not None))

    def shard_of(self, name: str) -> Shard | None:
        """That of a placeholder of the region's graphs. None: the model was deleted."""
        return self._positions[self._names[name]]()

    def keep_units(self, graph: MarkedGraph, backward: GraphModule, binding: Binding) -> None:
        """Decides which units stay gathered from this forward to its backward."""
        if self._planner is None:
            return
        residency = self.runtime.holdings.residency
        by_default = frozenset(unit.name for unit in binding.units if residency.stays_by_flag(unit))
        kept = self._planner.keep_units(
            lambda: self._outlined("forward", graph.gm, binding),
            lambda: self._outlined("backward", backward, binding),
            by_default,
            lambda choose: self.settled(KEPT, binding, choose),
        )
        if kept is not None:
            residency.decide({unit: unit.name in kept for unit in binding.units})

    def structure_for(self, forward: Binding) -> str:
        """The structure of a forward: parts of a unit that are equal share the region here, but not on all ranks."""
        if not forward.parts:
            return self.structure
        if (found := self._structures.get(forward.grouping)) is None:
            found = self._structures[forward.grouping] = self.structure_of(forward)
        return found

    def settled(
        self,
        what: str,
        binding: Binding,
        decide: Callable[[], str],
        state: str = "",
        meanwhile: Callable[[], object] | None = None,
        forward: Binding | None = None,
    ) -> str:
        """What all ranks do for this region, as one of them decides it; see `Consensus.settle`. `forward`: the shards
        of its forward, where they are not those of `binding`.
        """
        consensus, names = self.runtime.context.consensus, [unit.name or "root" for unit in ordered_units(binding)]
        shown = f"{what} of {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
        if flags := shown_state(state):
            shown = f"{shown} [{flags}]"
        key = program_key(what, self.structure_for(forward or binding), state)
        return consensus.settle(key, shown, decide, self.leader, meanwhile)

    @property
    def _outlines(self) -> bool:
        """Whether what is planned stays at the seams of equal blocks."""
        return self._bodies is not None and self._planner is not None and self._planner.chooses

    def _outlined(self, direction: Direction, gm: GraphModule, binding: Binding) -> tuple[Graph, PassContext]:
        """A graph that gathers and reduces everything, which gets the seams of its programs, and its context."""
        ctx = replace(self._usual_context(direction, gm, binding), outlines=self._outlines)
        context, title = self.runtime.context, f"{self.runtime.context.name}.region{self.number}.{direction}_marked"
        ctx = driver.mark_seams(gm, ctx, title, self._optional, context.report.note_once)
        return gm.graph, ctx

    def _usual_context(self, direction: Direction, gm: GraphModule, binding: Binding) -> PassContext:
        """The context of a graph that gathers and reduces everything."""
        names = {shard_placeholder(node).name for node in (*unshards(gm.graph), *reductions(gm.graph))}
        shards = {name: self.shard_of(name) for name in names}
        params = {name: shard.ref() for name, shard in shards.items() if shard is not None}
        fuses = fuses_on(binding.device, self.runtime.context.report.say_once)
        return PassContext(direction, params, usual_flags(direction, binding), fuses=fuses)

    def run_of(self, graph: MarkedGraph, binding: Binding) -> RegionRun | None:
        """One run of a graph that gathers and reduces everything, for the plan of a whole pass."""
        if self._planner is None:
            return None
        ctx = self._usual_context(graph.direction, graph.gm, binding)
        run = self._planner.run_of(graph.gm.graph, ctx)
        pairs = zip(graph.slots, binding.shards, strict=True)
        return run.renamed({ctx.params[name].fqn: (shard.fqn, shard.unit.name) for (name, _), shard in pairs})

    def check_slots(self, graph: MarkedGraph) -> None:
        """Raises:
        UnsupportedModel: a graph gathers what is no parameter of the region.
        """
        if graph.direction != "backward":
            found = {node.name: argument_position(node) for node in graph.gm.graph.find_nodes(op="placeholder")}
            self._names = {name: position for name, position in found.items() if position is not None}
        for name, _ in graph.slots:
            if self._names.get(name) not in self._positions:
                raise UnsupportedModel(
                    f"region {self.number}: %{name} of the {graph.direction} graph is gathered, but no sharded "
                    "parameter has its place among the inputs; run this model with `graphshard.eager(model)`"
                )

    @roomy
    @without_collection()
    def lower(
        self,
        graph: MarkedGraph,
        binding: Binding,
        convention: CallingConvention,
        state: str,
        late: bool,
        contract: Contract | None = None,
        held_bytes: int = 0,
        forward: Binding | None = None,
    ) -> Program:
        """Makes a program.

        Args:
            graph: with markers.
            binding: an example of a call.
            convention: what it is to do.
            state: of the units, in words that all ranks have in common.
            late: whether the compilation of the region is over.
            contract: that it realises; None: it is asked for, or made.
            held_bytes: that are held for other programs while it runs.
            forward: of a backward, the shards of its forward.
        """
        context, flags = self.runtime.context, convention.flags
        what = f"the {graph.direction} of region {self.number}"
        guarded = self.guards.noticed(graph.state.fake_mode if late and graph.state is not None else None)
        with compiling(context.name, what), self._traced.resumed(), guarded:
            params = {name: shard.ref() for (name, _), shard in zip(graph.slots, binding.shards, strict=True)}
            params |= {REJOINED + name: post_forward_ref(params[name]) for name in flags.rejoined}
            fuses = fuses_on(binding.device, context.report.say_once)
            ctx = PassContext(graph.direction, params, flags, outlines=self._outlines, fuses=fuses)
            title, text = self._title(graph), f"{graph.part} {flags}".lstrip()
            named = program_flags(text, context.name)
            if contract is not None:
                lowered, decision, _ = self._within_budget(graph, ctx, title, named, contract, held_bytes)
            else:
                lowered, decision, contract = self._lower_as_agreed(graph, binding, ctx, title, named, state, forward)
            for line in lowered.unchecked:
                context.report.note_once(line)
            start = time.perf_counter()
            # The second half of a backward is given other arguments than those that tell sizes.
            for_sizes = None if self._bodies is None or graph.part == "weights" else for_any_size(lowered.gm)
            run = self._compile(graph, lowered, late)
            record = ProgramRecord(
                self.number,
                graph.direction,
                text,
                launch_counts(lowered.gm.graph),
                lowered.passes_s,
                time.perf_counter() - start,
                planner_s=0.0 if self._planner is None else self._planner.newly_spent_s(),
                ir=format_graph(lowered.gm.graph),
                code=generated_code(run),
                decision=decision,
                computed=operators_of_units(lowered.gm.graph) if self._bodies is None else (),
                **communication_facts(lowered.gm.graph, binding.shards),
            )
            context.report.programs.append(record)
            log.info("graphshard: %s: passes %.1f s, compiled in %.1f s", title, record.passes_s, record.compile_s)
            plan = partial(explained_text, record, context.planning)
            show_program(context.name, title, record, context.report, plan)
            return Program(without_alias_check(run, lowered.gm), record, convention, contract, for_sizes)

    def _title(self, graph: MarkedGraph) -> str:
        """Name of the next program, for dumps."""
        context = self.runtime.context
        number = sum(record.region == self.number for record in context.report.programs)
        return f"{context.name}.region{self.number}.{number}.{graph.direction}{graph.part and '_' + graph.part}"

    def _compile(self, graph: MarkedGraph, lowered: Lowered, late: bool) -> BoxedCallable:
        """Code of a lowered graph. `late`: the compilation of the region is over."""
        runnable = with_gather_outputs(lowered.gm)
        with graph.state.resumed() if late and graph.state is not None else nullcontext():
            if self._bodies is None:
                run = plain_code(runnable)
            else:
                say = self.runtime.context.report.say_once
                run = self._bodies.compile_program(runnable, _inputs(graph, runnable), graph.kwargs, say)
        if not late:
            hide_results(len(output_args(lowered.gm.graph)) - graph.num_results)
        return run

    def _lower_as_agreed(
        self,
        graph: MarkedGraph,
        binding: Binding,
        ctx: PassContext,
        title: str,
        named: str,
        state: str,
        forward: Binding | None,
    ) -> tuple[Lowered, Decision | None, Contract | None]:
        """The program whose collectives are those of its contract: of this rank's making, or of another's."""
        made: list[tuple[Lowered, Decision | None]] = []
        params, planner = contract_params(binding), self._planner
        expected, notes = "", list[str]()
        what, known_by = f"{graph.direction} {graph.part}".rstrip(), self.structure_for(forward or binding)
        context, key = self.runtime.context, program_key(what, known_by, state)
        meet = partial(context.left_out.agreed, key) if self.is_whole or not graph.sends_nothing(ctx.flags) else None

        def decide() -> str:
            lowered, decision, failed = self._within_budget(graph, ctx, title, named, meet=meet)
            made.append((lowered, decision))
            return replace(contract_of(lowered.gm.graph, decision, params), without=tuple(sorted(failed))).text()

        if planner is None or not any(unit.world_size * unit.replicas > 1 for unit in binding.units):
            lowered, decision, _ = self._within_budget(graph, ctx, title, named)
            return lowered, decision, None

        def expect() -> None:
            nonlocal expected
            # What is wrong here alone does not matter: the contract is realised then.
            with suppress(BudgetTooSmall, PlanMismatch, VerifyError), planner.noting(notes.append):
                expected = decide()

        # Most often ranks are alike, and decide the same: then nothing is left to do when the decision comes, and their
        # programs are equal, so that they share what is compiled.
        if meet is None:  # a part of a call, which one rank alone may run
            text = decide()
        else:
            text = self.settled(what, binding, decide, state, expect if self._expects else meet, forward)
        contract = Contract.parse(text)
        self.runtime.follower.learn(known_by, graph.direction, contract)
        if expected and expected != text:
            self._expects = False
            made.clear()
        elif expected:
            for line in notes:
                planner.note(line)
        if made:
            return *made[0], contract
        lower, note = partial(self._within_budget, graph, ctx, title, named), context.report.note_once
        found, contract = context.any_order.kept(key, what, contract.for_params(params), lower, note)
        return *found[:2], contract

    def _within_budget(
        self,
        graph: MarkedGraph,
        ctx: PassContext,
        title: str,
        named: str,
        contract: Contract | None = None,
        held_bytes: int = 0,
        meet: Callable[[Collection[str]], frozenset[str] | None] | None = None,
    ) -> tuple[Lowered, Decision | None, frozenset[str]]:
        """A program without optional passes that fail on it (see `driver`), and the names of these.

        Args:
            graph: with markers.
            ctx: its context.
            title: of dumps.
            named: text of its flags, with the model's name.
            contract: that it realises: then only what is this rank's own matter is left out.
            held_bytes: that are held for other programs while it runs.
            meet: tells the other ranks what has failed here, and yields what has on any; None: there is nobody to tell.
        """
        optional = self._optional if contract is None else self._optional & driver.OWN
        note, has_met = self.runtime.context.report.note_once, meet is None
        try:
            while True:
                try:
                    found = lower_within_budget(graph.gm, ctx, title, self._planner, named, contract, held_bytes)
                except VerifyError as error:
                    ctx = driver.leaves_out(error, optional, ctx, note, title)
                    continue
                if meet is None or has_met:
                    return *found, ctx.without
                has_met, agreed = True, meet(ctx.without)
                if agreed is None or agreed == ctx.without:
                    return *found, ctx.without
                for name in sorted(agreed - ctx.without):
                    note(f"pass {name} is left out of {title}: it fails on another rank")
                ctx = replace(ctx, without=agreed)
        finally:
            if meet is not None and not has_met:  # nobody is to wait for what this rank cannot lower
                meet(())

    @property
    def _optional(self) -> frozenset[str]:
        """Passes that are left out where they fail."""
        return frozenset() if self.runtime.context.strict else driver.OPTIONAL

    def accumulates_sharded(self, graph: MarkedGraph, binding: Binding, forward: Binding | None) -> str:
        """Why a backward that is asked to leave gradients unreduced reduces them all the same; ``""``: it does not."""
        planner = self._planner
        if planner is None or not planner.budget_is_asked:
            return ""
        ctx = self._usual_context("backward", graph.gm, binding)
        decide = partial(planner.accumulates_sharded, graph.gm.graph, ctx)
        return self.settled("accumulation", binding, decide, forward=forward)


def _inputs(graph: MarkedGraph, lowered: GraphModule) -> list[Any]:
    """Example inputs of a lowered graph: those of the marked one, then the fake values of what a pass has added."""
    added = [node for node in lowered.graph.nodes if node.op == "placeholder"][len(graph.inputs) :]
    return [*graph.inputs, *(node.meta["val"] for node in added)]
