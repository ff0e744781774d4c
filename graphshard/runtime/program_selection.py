"""What a region does around its programs: what it gathers before one, which one it is, what it reduces behind it.

A region that has come apart on this rank alone (see `route`) does the same around its parts.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from graphshard.agree.contract import Contract
from graphshard.following.followed_pass import FollowedPass, check_own, members
from graphshard.following.route import Leg
from graphshard.fsdp2 import Unit
from graphshard.graph.ir import Direction
from graphshard.passes.apply_flags import dead_outputs
from graphshard.runtime.region_lowering import RegionLowering
from graphshard.state.binding import Binding
from graphshard.state.call_state import (
    accumulates,
    backward_states,
    forward_states,
    reduced_early,
    reducing_each,
    staying_units,
)
from graphshard.state.calling_convention import calling_convention
from graphshard.state.calls import BackwardRequest
from graphshard.state.marked_graph import MarkedGraph, Program
from graphshard.state.signatures import contract_params, state_text
from graphshard.state.unit_state import UnitState


class SelectedBackward(NamedTuple):
    """What one run of a backward does.

    Attributes:
        binding: its shards.
        states: of their units.
        program: that runs.
        behind: units whose gradients are reduced behind it.
        split: units that are reduced as a whole.
        ended: those of them that no other call of this backward uses.
    """

    binding: Binding
    states: list[UnitState]
    program: Program
    behind: frozenset[Unit]
    split: frozenset[Unit]
    ended: frozenset[Unit]


class ProgramSelection:
    """Selects the programs of one region's forwards and backwards.

    Args:
        lowering: makes its programs.
        broken: whether its graph is known to be a part of what the user called.

    Attributes:
        backward_graph: of the region, once there is one.
    """

    def __init__(self, lowering: RegionLowering, broken: bool) -> None:
        self._lowering = lowering
        self._broken = broken
        self._programs: dict[tuple[object, ...], Program] = {}
        self._dead: dict[tuple[str, frozenset[str], bool], frozenset[int]] = {}
        self._usual: dict[str, float] = {}  # how many parts of it used each parameter where it was followed
        self.backward_graph: MarkedGraph | None = None

    def program(
        self,
        graph: MarkedGraph,
        binding: Binding,
        states: list[UnitState],
        undefined: frozenset[str] = frozenset(),
        inputs_only: bool = False,
        late: bool = True,
        forward: Binding | None = None,
    ) -> Program:
        """The program for one state of a call; lowered when it is missing. `forward`: of a backward, its forward's."""
        changes = self._lowering.runtime.context.any_order.changes
        key = (graph.direction, graph.part, binding.grouping, binding.key(states), undefined, inputs_only, changes)
        if (program := self._programs.get(key)) is None:
            names = [name for name, _ in graph.slots]
            if graph.direction == "forward":
                self._lowering.runtime.prefetch.say_ignored(binding)
            convention = calling_convention(
                names, graph.gathered, graph.reduced, binding, states, undefined, inputs_only
            )
            state = state_text(binding, states, graph.direction == "backward", forward)
            program = self._programs[key] = self._lowering.lower(
                graph, binding, convention, state, late, forward=forward
            )
        return program

    @property
    def is_part(self) -> bool:
        """Whether the region, of which a forward is about to run, is not all of what the user called."""
        return not self._lowering.runtime.follower.is_whole(self._broken)

    def before_forward(self, graph: MarkedGraph, binding: Binding) -> Program:
        """Gathers what the program does not; returns the program that runs then."""
        holdings = self._lowering.runtime.holdings
        split = holdings.split.in_forward(binding.parts, self._broken) if binding.parts else frozenset[Unit]()
        self._lowering.runtime.prefetch.before_forward(
            graph, binding, split, self.is_part, partial(self._lowering.run_of, graph, binding)
        )
        holdings.forward.regions_run += 1
        return self.program(graph, binding, forward_states(holdings, binding))

    def before_backward(
        self,
        graph: MarkedGraph,
        binding: Binding,
        asked: BackwardRequest,
        dead: frozenset[int],
        undefined: frozenset[str] = frozenset(),
    ) -> SelectedBackward:
        """Gathers what the program does not; returns the program that runs then, and what is done behind it."""
        runtime = self._lowering.runtime
        split = runtime.holdings.split.in_backward(binding) if binding.parts else frozenset[Unit]()
        runtime.prefetch.before_backward(graph, binding, split, asked, partial(self._lowering.run_of, graph, binding))
        behind = frozenset[Unit]()
        if runtime.backward.deferred is None:
            behind = runtime.prefetch.reduced_behind(graph, binding, split, asked)
        states = backward_states(runtime.holdings, graph.reduced, binding, asked, dead, split, behind)
        if runtime.context.planning is not None and any(map(accumulates, binding.units)):
            states = self._with_accumulation(graph, binding, states, split, asked.forward)
        undefined = undefined if dead else frozenset()
        program = self.program(graph, binding, states, undefined, asked.inputs_only, forward=asked.forward)
        return SelectedBackward(binding, states, program, behind, split, split - asked.units_again)

    def behind_backward(self, selected: SelectedBackward) -> None:
        """Reduces what the program has left, and frees what was gathered for it."""
        holdings = self._lowering.runtime.holdings
        _free(selected.binding)  # another call will gather it again
        ended = holdings.reductions.end_split(selected.ended) if selected.ended else []
        self._lowering.runtime.prefetch.reduce_behind([*selected.behind, *ended])

    def _with_accumulation(
        self,
        graph: MarkedGraph,
        binding: Binding,
        states: list[UnitState],
        split: frozenset[Unit],
        forward: Binding | None,
    ) -> list[UnitState]:
        """Reduces gradients that were to stay unreduced, if they would not fit the memory budget."""
        why = self._lowering.accumulates_sharded(graph, binding, forward)
        if not why:
            return states
        self._lowering.runtime.context.report.accumulates_sharded(why)
        return reducing_each(binding, states, split)

    def dead_outputs(self, graph: MarkedGraph, undefined: frozenset[str], inputs_only: bool) -> frozenset[int]:
        """Positions of results that have no gradient when these tangents have none, or no parameter is to get one."""
        if not undefined and not inputs_only:
            return frozenset()
        key = (graph.part, undefined, inputs_only)
        if key not in self._dead:
            self._dead[key] = frozenset(dead_outputs(graph.gm.graph, undefined, inputs_only))
        return self._dead[key]

    # -- a region that has come apart on this rank (see `route`)

    def known_as(self, leg: Leg) -> FollowedPass | None:
        """What was sent when a leg last ran, for a part that is compiled now; None: it cannot be followed."""
        if (
            self._lowering.structure_of(leg.binding) != leg.structure
        ):  # frozen meanwhile: others have another graph of it
            return None
        if leg.program.contract is None or (leg.graph.direction == "forward" and not self._knows_backward_of(leg)):
            return None
        followed = _sent_for(leg, leg.binding, leg.program, leg.graph.direction)
        followed.brought = frozenset(followed.shards) - frozenset(members(followed.contract.buckets, "gather"))
        return followed

    def _knows_backward_of(self, leg: Leg) -> bool:
        names = {name for name, _ in leg.graph.slots}
        return self.backward_graph is not None and all(name in names for name, _ in self.backward_graph.slots)

    def enter(self, leg: Leg) -> FollowedPass:
        """Does what ranks do before the program of a leg; returns what they send then."""
        program = self.before_forward(leg.graph, leg.binding)
        followed = _sent_for(leg, leg.binding, program, leg.graph.direction)
        check_own(followed.contract)
        followed.usual = self._usual

        def end() -> None:
            self._usual |= {fqn: max(count, self._usual.get(fqn, 0)) for fqn, count in followed.uses.items()}
            _free(leg.binding)

        followed.end = end
        return followed

    def enter_backward(self, leg: Leg, asked: BackwardRequest) -> FollowedPass:
        """The same of its backward."""
        graph = self.backward_graph
        assert graph is not None
        shard_of = {name: shard for (name, _), shard in zip(leg.graph.slots, leg.binding.shards, strict=True)}
        binding = Binding(tuple(shard_of[name] for name, _ in graph.slots))
        dead = self.dead_outputs(graph, frozenset(), asked.inputs_only)
        selected = self.before_backward(graph, binding, asked, dead)
        followed = _sent_for(leg, binding, selected.program, "backward")
        check_own(followed.contract)
        followed.again = asked.again
        followed.staying = staying_units(binding, selected.states)
        followed.reduced_early = reduced_early(binding, selected.states)
        followed.reached = frozenset(binding.shards[slot] for slot, at in graph.reduced.items() if at not in dead)
        followed.unreduced = selected.behind | selected.split
        followed.end = partial(self.behind_backward, selected)
        return followed


def _free(binding: Binding) -> None:
    for shard in binding.shards:
        if shard.is_for_one_program:
            shard.reshard()


def _sent_for(leg: Leg, binding: Binding, program: Program, direction: Direction) -> FollowedPass:
    params = contract_params(binding)
    # No contract: a part that sends nothing, as the backward of what is frozen and stays gathered.
    contract = Contract((), (), tuple(params)) if program.contract is None else program.contract.for_params(params)
    return FollowedPass(leg.role(follows=True).whole, contract, direction)
