"""Programs of a region that is a part, on this rank, of what is one graph on others (see `followed_pass`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from graphshard.agree.contract import Contract
from graphshard.errors import RanksDiffer
from graphshard.following.followed_pass import FollowedPass, Part, empty_graph, extended, extra_args, members
from graphshard.graph.ir import output_args
from graphshard.graph.plan import PlannedBucket
from graphshard.state.binding import Binding
from graphshard.state.calling_convention import CallingConvention, calling_convention
from graphshard.state.calls import BackwardRequest
from graphshard.state.holdings import Holdings
from graphshard.state.marked_graph import MarkedGraph, Program, marked_graph
from graphshard.state.shards import POST_FORWARD, RESIDENT, Shard
from graphshard.state.unit_state import AGAIN, KEEP, LATER, REACHED, RESHARD, STAYS, UnitState


class Runner(Protocol):
    """What runs the region's programs."""

    number: int

    @property
    def holdings(self) -> Holdings:
        """Of the model."""

    def run(self, program: Program, binding: Binding, args: list[Any]) -> list[Any]:
        """Runs it with what shards hold; takes what it leaves unreduced."""


class Lowering(Protocol):
    """What makes the region's programs."""

    def lower(
        self,
        graph: MarkedGraph,
        binding: Binding,
        convention: CallingConvention,
        state: str,
        late: bool,
        contract: Contract,
        held_bytes: int,
    ) -> Program:
        """Makes a program that realises a contract."""


@dataclass
class _Step:
    """One run of a program: what it does of the contract, and with what."""

    part: Part
    gathers: list[Shard]
    reductions: list[Shard]
    handed: list[Shard]
    binding: Binding
    program: Program


class PartPrograms:
    """The programs of one region.

    Args:
        runner: runs them.
        lowering: makes them.
    """

    def __init__(self, runner: Runner, lowering: Lowering) -> None:
        self._runner = runner
        self._lowering = lowering
        self._graphs: dict[tuple[str, str, Part], MarkedGraph] = {}
        self._programs: dict[tuple[object, ...], Program] = {}

    # -- forward

    def lower_forward(self, graph: MarkedGraph, binding: Binding, followed: FollowedPass) -> None:
        """Makes the program that a forward is about to run."""
        self._forward_step(graph, binding, followed, late=False)

    def forward(self, graph: MarkedGraph, binding: Binding, args: list[Any], followed: FollowedPass) -> list[Any]:
        """Runs a forward, or one that a checkpoint recomputes; what it gathers stays for the programs to come."""
        step = self._forward_step(graph, binding, followed)
        results, fulls, _ = self._run(step, graph, args, followed)
        self._keep(step, fulls)
        if not self._runner.holdings.forward.in_backward:
            followed.use(binding.shards)
            self._free(followed, (*binding.shards, *step.gathers))
        return results

    def _free(self, followed: FollowedPass, shards: Sequence[Shard]) -> None:
        for shard in shards:
            if shard.is_for_one_program and followed.is_used_up(shard):
                shard.reshard()

    def bring(self, followed: FollowedPass, shard: Shard) -> None:
        """Gathers a parameter that is read outside any graph."""
        followed.use([shard], outside=True)
        if shard.full is not None:
            return
        direction = followed.direction
        buckets = followed.part([shard.fqn], (), lambda shard: True, f"the {direction} outside any graph")
        graph = marked_graph(empty_graph(direction), direction, [], {}, None)
        step = self._step(graph, Binding(()), followed, buckets, lambda shard: 0)
        _, fulls, _ = self._run(step, graph, [], followed)
        self._keep(step, fulls)
        self._free(followed, step.gathers)

    def _forward_step(self, graph: MarkedGraph, binding: Binding, followed: FollowedPass, late: bool = True) -> _Step:
        missing = self._missing(graph, binding, followed)
        buckets = followed.part(
            missing, (), lambda shard: True, f"the {graph.direction} of region {self._runner.number}"
        )

        def bits(shard: Shard) -> int:
            return shard.bits & RESIDENT | STAYS | (RESIDENT if shard.fqn in followed.brought else 0)

        return self._step(graph, binding, followed, buckets, bits, late=late)

    def _keep(self, step: _Step, fulls: Sequence[Tensor]) -> None:
        holdings = self._runner.holdings
        for shard, full in zip((*step.handed, *step.gathers), fulls, strict=True):
            if not holdings.forward.in_backward and holdings.residency.behind_forward(shard.unit) == KEEP:
                shard.stay(full)
            else:
                shard.keep(full)
            holdings.shards.active.add(shard.unit)
            holdings.forward.touched.add(shard.unit)

    # -- backward

    def backward(
        self,
        graph: MarkedGraph,
        binding: Binding,
        args: list[Any],
        followed: FollowedPass,
        asked: BackwardRequest,
        dead: frozenset[int],
        undefined: frozenset[str],
    ) -> list[Any]:
        """Runs a backward."""
        holdings = self._runner.holdings
        later: set[Shard] = set()
        for call in holdings.calls:
            if call.follows():
                later.update((call.binding if call.role is asked.role else call.sent).shards)
        reduces = {shard.unit: followed.reduces(shard.unit) for shard in binding.shards}
        ready = {
            binding.shards[slot].fqn
            for slot, position in graph.reduced.items()
            if position not in dead and binding.shards[slot] not in later and reduces[binding.shards[slot].unit]
        }
        where = f"the backward of region {self._runner.number}"
        buckets = followed.part(self._missing(graph, binding, followed), ready, later.__contains__, where)
        sent = {*members(buckets, "reduce")}
        reached = {binding.shards[slot] for slot, position in graph.reduced.items() if position not in dead}

        def bits(shard: Shard) -> int:
            found = shard.bits | STAYS | (REACHED if shard in reached else 0)
            if shard in later and shard.leaf.requires_grad:
                return found | AGAIN
            return found if shard.fqn in sent else found | LATER

        step = self._step(graph, binding, followed, buckets, bits, undefined, asked.inputs_only)
        results, fulls, reduced = self._run(step, graph, args, followed)
        for shard, full in zip((*step.handed, *step.gathers), fulls, strict=True):
            shard.keep(full)
            holdings.shards.active.add(shard.unit)
        self._deliver(step.reductions, reduced)
        for shard in dict.fromkeys((*binding.shards, *step.gathers)):
            if shard not in later and shard.unit.reshard_after_backward and shard.is_for_one_program:
                shard.reshard()
        return results

    def _deliver(self, shards: Sequence[Shard], reduced: Sequence[Tensor | None]) -> None:
        for shard, grad in zip(shards, reduced, strict=True):
            if grad is not None:
                shard.deliver(grad)

    # -- the end of a pass

    def finish(self, followed: FollowedPass) -> None:
        """Does what is left of the contract: gathers that this rank does not need, reductions of zeros."""
        direction = followed.direction
        if buckets := followed.rest():
            graph = marked_graph(empty_graph(direction), direction, [], {}, None)
            step = self._step(graph, Binding(()), followed, buckets, lambda shard: 0)
            _, fulls, reduced = self._run(step, graph, [], followed)
            if direction == "forward":
                self._keep(step, fulls)
                self._free(followed, step.gathers)
            elif direction == "backward":
                for shard, full in zip(step.gathers, fulls, strict=True):
                    shard.keep(full)
                    self._runner.holdings.shards.active.add(shard.unit)
            self._deliver(step.reductions, reduced)
        if direction == "backward":
            self._leave_as_others(followed)
        followed.end()

    def _leave_as_others(self, followed: FollowedPass) -> None:
        """Later programs see the state that those of other ranks see."""
        for fqn in members(followed.contract.buckets, "gather"):
            shard = followed.shards[fqn]
            if shard.unit not in followed.staying and shard.is_for_one_program:
                shard.reshard()
        for shard in followed.reached:
            if not shard.unit.reduce_unused:
                self._fill(shard, followed)

    def _fill(self, shard: Shard, followed: FollowedPass) -> None:
        """Zeros for what this rank has not used, where others hold a gradient."""
        param, unit, device = shard.param, shard.unit, shard.unit.device
        is_held = not followed.reduces(unit) or unit in followed.unreduced
        if shard in followed.again:
            if shard.pending is None:
                shard.pending = torch.zeros(param.size, dtype=param.param_dtype, device=device)
        elif is_held and shard.held is None and shard.pending is None:
            shard.held = torch.zeros(param.size, dtype=param.reduce_dtype, device=device)
        if shard.held is not None or shard.pending is not None:
            self._runner.holdings.shards.active.add(unit)

    # -- both

    def _missing(self, graph: MarkedGraph, binding: Binding, followed: FollowedPass) -> list[str]:
        found = []
        for slot in graph.gather_order:
            shard = binding.shards[slot]
            if shard.post_forward is not None:
                raise RanksDiffer(
                    f"contract: '{shard.fqn}' is kept over a smaller group after forward, which a rank whose graphs "
                    "break where others do not cannot follow; want no graph break, or another reshard_after_forward"
                )
            if shard.full is None and shard.unit.world_size > 1 and shard.fqn not in followed.brought:
                found.append(shard.fqn)
        return found

    def _step(
        self,
        graph: MarkedGraph,
        binding: Binding,
        followed: FollowedPass,
        buckets: tuple[PlannedBucket, ...],
        bits: Callable[[Shard], int],
        undefined: frozenset[str] = frozenset(),
        inputs_only: bool = False,
        late: bool = True,
    ) -> _Step:
        missing = self._missing(graph, binding, followed)
        own = {shard.fqn: shard for shard in binding.shards}
        names = {binding.shards[slot].fqn: graph.slots[slot][0] for slot in graph.gather_order}
        reduces = {
            binding.shards[slot].fqn
            for slot in graph.reduced
            if bits(binding.shards[slot]) & REACHED and not bits(binding.shards[slot]) & (AGAIN | LATER)
        }
        handed = [own[fqn] for fqn in missing]
        gathers = [followed.shards[fqn] for fqn in members(buckets, "gather") if fqn not in missing]
        reductions = [followed.shards[fqn] for fqn in members(buckets, "reduce") if fqn not in reduces]
        part = Part(
            buckets,
            tuple(shard.fqn for shard in gathers),
            tuple(shard.fqn for shard in reductions),
            tuple(names[fqn] for fqn in missing),
        )
        key = (graph.direction, graph.part, part)
        if (wider := self._graphs.get(key)) is None:
            wider = self._graphs[key] = extended(graph, gathers, reductions, part.handed)
        others = tuple(dict.fromkeys((*gathers, *reductions)))
        whole = Binding((*binding.shards, *others))
        states = self._states(whole, len(binding.shards), followed, bits)
        program_key = (*key, whole.grouping, tuple(unit.name for unit in whole.units), *states, undefined, inputs_only)
        if (program := self._programs.get(program_key)) is None:
            convention = calling_convention(
                [name for name, _ in wider.slots], wider.gathered, wider.reduced, whole, states, undefined, inputs_only
            )
            contract = followed.contract_for(part)
            held_bytes = sum(shard.held_bytes for shard in followed.shards.values() if shard not in whole.shards)
            program = self._lowering.lower(wider, whole, convention, "", late, contract, held_bytes)
            self._programs[program_key] = program
        return _Step(part, gathers, reductions, handed, whole, program)

    def _states(
        self, binding: Binding, own: int, followed: FollowedPass, bits: Callable[[Shard], int]
    ) -> list[UnitState]:
        states, backward = [], followed.direction == "backward"
        for unit, slots in zip(binding.units, binding.slots, strict=True):
            settings = unit.backward_settings() if backward else unit.forward_settings()
            found = tuple(
                bits(binding.shards[slot]) & ~POST_FORWARD if slot < own else REACHED | STAYS for slot in slots
            )
            states.append(UnitState(settings, RESHARD, not backward or followed.reduces(unit), None, found))
        return states

    def _run(
        self, step: _Step, graph: MarkedGraph, args: list[Any], followed: FollowedPass
    ) -> tuple[list[Any], list[Tensor], list[Tensor | None]]:
        """The graph's own results, what is gathered for others, what is reduced of others."""
        taken = [*args, *extra_args(step.gathers, step.reductions)]
        args.clear()
        results = self._runner.run(step.program, step.binding, taken)
        followed.done += len(step.part.buckets)
        first = len(output_args(graph.gm.graph))
        second = first + len(step.handed) + len(step.gathers)
        return results[:first], results[first:second], results[second:]
