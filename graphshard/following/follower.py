"""Notices when the graphs of this rank are not those of the other ranks, and has it follow their contracts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import nn

from graphshard.agree.contract import Contract
from graphshard.compat.autograd import backward_id
from graphshard.errors import RanksDiffer
from graphshard.following.derived_contract import derived
from graphshard.following.followed_pass import FollowedPass, check_own
from graphshard.following.route import Leg, Route
from graphshard.following.variants import Variants
from graphshard.fsdp2 import Unit
from graphshard.graph.ir import Direction
from graphshard.state.binding import Binding
from graphshard.state.call_state import (
    accumulates,
    backward_states,
    forward_states,
    reduced_early,
    reducing_each,
    staying_units,
)
from graphshard.state.calls import BackwardRequest, Call
from graphshard.state.holdings import Holdings
from graphshard.state.model_context import ModelContext
from graphshard.state.shards import Shard
from graphshard.state.signatures import Role, WholeCall, program_key, state_text
from graphshard.state.unit_state import UnitState

KEPT = "units kept for backward"


class Follower:
    """What one rank knows of the calls that other ranks make as a whole.

    Args:
        context: of the model.
        holdings: of the model.
        is_on: whether calls can be whole at all.
        follows_legs: whether regions have contracts.

    Attributes:
        role: of the running call; None: none so far, or all ranks do the same by themselves.
        finish: does what is left of a forward or backward that is followed.
    """

    def __init__(self, context: ModelContext, holdings: Holdings, is_on: bool, follows_legs: bool) -> None:
        self._context = context
        self._holdings = holdings
        self._is_on = is_on and context.consensus.has_peers
        self._follows_legs = context.consensus.has_peers and follows_legs
        self._variants: dict[str, Variants | None] = {}
        self._latest: dict[tuple[str, str], Contract] = {}
        self._needed: dict[str, frozenset[str]] = {}  # by structure: FQNs of what a backward gathers
        self._numbers: Counter[str] = Counter()  # of calls, by entry
        self._route = Route(context.consensus, context.report.note_once, holdings.split.units)
        self._module: nn.Module | None = None
        self._is_known = False  # what the running call is
        self._is_in_legs = True  # so it is, as far as known
        self.role: Role | None = None
        self.forward: FollowedPass | None = None
        self._running: Variants | None = None
        self.backward: FollowedPass | None = None
        self._backward_role: Role | None = None
        self._backward_id = -1
        self.finish: Callable[[FollowedPass], None] = lambda followed: None

    def begin_forward(self, module: nn.Module) -> None:
        """An outermost call of `module` begins."""
        if not self._holdings.forward.in_backward:
            self._forget_forward()
            self._module = module
            self._numbers[self._holdings.forward.entry.name] += 1

    def runs(self, leg: Leg) -> Role | None:
        """Is told that a region runs its own program; returns what that is to other ranks."""
        if not self._is_in_legs:
            return self.role
        if not self._holdings.forward.in_backward and leg.binding.units:
            self._route.use(leg)
        return leg.role(follows=False)

    def may_end(self, unit: Unit) -> bool:
        """Whether what is gathered of a unit may be freed when its module ends: it may not be gathered again."""
        return self.forward is None or (self._is_in_legs and unit in self._holdings.split.units)

    def _forget_forward(self) -> None:
        self._route.begin()
        self._is_known, self.role, self.forward, self._running = False, None, None, None
        self._is_in_legs = True

    @property
    def leader(self) -> int | None:
        """The rank that decides for the running call; None: the lowest."""
        return None if self._running is None else self._running.primary.leader

    def is_whole(self, broken: bool) -> bool:
        """Whether the region that runs now is all of what the user called."""
        holdings = self._holdings
        return not (broken or holdings.forward.nested or holdings.forward.regions_run)

    def of_forward(
        self, direction: Direction, binding: Binding, structure: str, broken: bool, runs: bool = True
    ) -> FollowedPass | None:
        """What a region's forward follows; None: it is the whole call, or all ranks have such parts.

        Args:
            direction: of its graph: ``"forward"``, or ``"inference"``, as of a part in which nothing needs a gradient.
            binding: its shards.
            structure: its own (see `signatures`).
            broken: whether it is known to be a part.
            runs: whether it runs now; else it is compiled.
        """
        holdings = self._holdings
        if holdings.forward.in_backward:
            return None if _is_leg(self._backward_role) else self.backward
        if self._is_on and binding.units and not self._is_known:
            self._is_known = True
            self.role = self._role(direction, binding, structure if self.is_whole(broken) else "")
            if self.role is not None and self.role.follows and self._running is not None:
                states = forward_states(holdings, self.role.whole.binding)
                self.forward = self._followed_pass(self.role.whole, self.role.whole.direction, states)
                self.forward.usual = self._running.usual
            self._is_in_legs = self.role is None
        if self._is_in_legs and self._follows_legs and binding.units:
            return self._of_leg(binding, structure, runs)
        return self.forward

    def _of_leg(self, binding: Binding, structure: str, runs: bool) -> FollowedPass | None:
        """What a part follows of a call that is in parts on all ranks."""
        leg = self._route.leg_of(self._what, self._number, binding, structure)
        if leg is not None and leg is self._route.current:
            return self.forward
        if leg is None:
            self._route.check_first(self._what, self._number, binding, runs)
        if not runs:
            return None if leg is None else leg.programs.known_as(leg)
        if self.forward is not None:
            self.finish(self.forward)
        self.forward = self.role = None
        if leg is not None:
            self._route.enter(leg)
            self.role = leg.role(follows=True)
            self.forward = leg.programs.enter(leg)
        return self.forward

    @property
    def _what(self) -> str:
        """What the running call is, in words."""
        return f"the {self.mode} of '{self._holdings.forward.entry.name}'"

    @property
    def mode(self) -> Direction:
        """What the running call is on all ranks, whatever needs a gradient in a part of it."""
        return "inference" if self._holdings.forward.is_inference else "forward"

    @property
    def _number(self) -> int:
        return self._numbers[self._holdings.forward.entry.name]

    def _role(self, direction: Direction, binding: Binding, structure: str) -> Role | None:
        """What the running call is, by its first region. `structure`: of the whole call; empty: a part."""
        key = self._what
        if key not in self._variants:
            self._variants[key] = self._meet(key, direction, binding, structure)
        if (variants := self._variants[key]) is None:
            return None
        self._running = variants
        if structure:
            return variants.role(binding, structure, self._number, direction)
        if not frozenset(binding.shards) <= frozenset(variants.primary.binding.shards):
            return None
        self._context.report.note_once(
            f"{variants.what}: graph breaks leave parts of what was one graph: they gather and reduce bucket by "
            "bucket, in the order of the whole"
        )
        return Role(variants.primary, follows=True)

    def _meet(self, what: str, direction: Direction, binding: Binding, structure: str) -> Variants | None:
        """Learns how the first call of a kind is on the other ranks; None: a part on all of them."""
        consensus, report, module = self._context.consensus, self._context.report, self._module
        election = consensus.elect(f"leader\n{what}", what, structure)
        if (leader := election.leader) is None:
            return None

        def everything() -> WholeCall:
            assert module is not None
            inside = {id(inner) for inner in module.modules()}
            shards = (
                shard for shard in self._holdings.shards if any(id(own) in inside for own, _ in shard.param.owners)
            )
            return WholeCall(f"all parameters of {what}", _ordered(shards), leader, self.mode)

        if not election.alike:  # a part of the model that some ranks do not use: they gather it all the same
            found = Variants(consensus, what, everything(), everything, report.note_once)
            found.differs(by_all=True)
            return found
        names = [shard.fqn for shard in binding.shards]
        text = consensus.settle(f"whole\n{what}", what, lambda: json.dumps([structure, names, direction]), leader)
        if structure:
            own = WholeCall(structure, binding, leader, direction)
            return Variants(consensus, what, own, everything, report.note_once)
        structure, names, of_all = json.loads(text)
        whole = self._whole_of(structure, names, of_all, leader)
        if whole.direction == "forward" and self._chooses_kept(whole.binding.unit_set):
            self._keep_units(whole)
        return Variants(consensus, what, whole, everything, report.note_once)

    def _chooses_kept(self, units: frozenset[Unit]) -> bool:
        """Whether it is planned which of `units` stay gathered from forward to backward."""
        planning = self._context.planning
        return planning is not None and planning.mode != "fsdp2" and self._holdings.shards.is_whole(units)

    def _keep_units(self, whole: WholeCall) -> None:
        """Lets the units stay gathered for backward that the deciding rank lets stay."""

        def decide() -> str:
            raise AssertionError("a rank without the whole graph does not lead its first call")

        text = self._context.consensus.settle(program_key(KEPT, whole.structure, ""), KEPT, decide, whole.leader)
        if (names := json.loads(text)) is not None:
            self._holdings.residency.decide({unit: unit.name in names for unit in whole.binding.units})

    def _whole_of(self, structure: str, names: list[str], direction: Direction, leader: int) -> WholeCall:
        by_name = {shard.fqn: shard for shard in self._holdings.shards}
        if missing := [name for name in names if name not in by_name]:
            raise RanksDiffer(f"contract: rank {leader} has a parameter '{missing[0]}', which this rank lacks")
        return WholeCall(structure, _ordered(by_name[name] for name in names), leader, direction)

    def of_backward(self, asked: BackwardRequest) -> FollowedPass | None:
        """What the running backward follows; None: nothing, as its forward.

        Raises:
            RanksDiffer: it goes from one call to another and back.
        """
        if (number := backward_id()) != self._backward_id:
            self._backward_id, self.backward, self._backward_role = number, None, None
        role = asked.role
        if role is self._backward_role or (role is None and not _is_leg(self._backward_role)):
            return self.backward
        if self.backward is not None:  # of a later call, which ends before this one on the other ranks
            if any(call.role is self._backward_role and call.follows() for call in self._holdings.calls):
                raise RanksDiffer(
                    "contract: backward comes to an earlier call before it has ended a later one, which a rank whose "
                    "graphs break where those of others do not cannot follow; call backward for each of them"
                )
            self.finish(self.backward)
        self._backward_role = role
        self.backward = self._of_call(role, asked) if role is not None and role.follows else None
        return self.backward

    def _of_call(self, role: Role, asked: BackwardRequest) -> FollowedPass:
        """What the backward of a call follows."""
        binding, holdings = role.whole.binding, self._holdings
        again, units_again = frozenset[Shard](), frozenset[Unit]()
        for call in holdings.calls:
            if call.role is not role and call.follows():
                again |= binding.overlap(call.sent)
                units_again |= binding.parts.intersection(holdings.split.units) & call.binding.unit_set
        leg = role.leg if isinstance(role.leg, Leg) else None
        is_part = leg is not None
        usual = BackwardRequest(asked.entry, (), again, units_again, asked.inputs_only, role, binding, is_part)
        if leg is not None:
            return leg.programs.enter_backward(leg, usual)
        reduced = {slot: slot for slot, shard in enumerate(binding.shards) if shard.leaf.requires_grad}
        dead = frozenset(reduced) if asked.inputs_only else frozenset[int]()
        states = backward_states(holdings, reduced, binding, usual, dead, frozenset())
        if why := self._accumulates_sharded(role.whole):
            self._context.report.accumulates_sharded(why)
            states = reducing_each(binding, states, frozenset())
        followed = self._followed_pass(role.whole, "backward", states)
        followed.again = again
        followed.reached = frozenset(binding.shards[slot] for slot in reduced if slot not in dead)
        followed.staying, followed.reduced_early = staying_units(binding, states), reduced_early(binding, states)
        return followed

    def _accumulates_sharded(self, whole: WholeCall) -> str:
        """Why other ranks reduce what users want to have accumulated unreduced; ``""``: they do not."""
        planning = self._context.planning
        if planning is None or planning.budget_bytes is None or not any(map(accumulates, whole.binding.units)):
            return ""
        key = program_key("accumulation", whole.structure, "")
        return self._context.consensus.settle(key, "accumulation", lambda: "", whole.leader)

    def reads_outside(self, shard: Shard) -> None:
        """Is told that a parameter is gathered to be read outside any graph."""
        if self.forward is None and self._is_in_legs and not self._holdings.forward.in_backward:
            self._route.use(shard)

    def outside_call(self, shard: Shard, node: Any) -> Call | None:
        """Such a read as a call whose backward is still to come; None: nothing is followed. `node`: of autograd's."""
        if self.forward is None or node is None:
            return None
        holdings = self._holdings
        call = Call(Binding((shard,)), holdings.forward.entry, self.role, node)
        holdings.calls.add(call)
        return call

    def outside_backward(self, call: Call) -> None:
        """Is told that the gradient of such a read is there."""
        self._holdings.calls.reached(call)
        self.of_backward(BackwardRequest(call.entry, role=call.role))

    def _followed_pass(self, whole: WholeCall, direction: Direction, states: Sequence[UnitState]) -> FollowedPass:
        state = state_text(whole.binding, states, direction == "backward")
        key = program_key(direction, whole.structure, state)
        base_key = (whole.structure, direction)

        def decide() -> str:
            needed = self._needed.get(whole.structure) if direction == "backward" else None
            if (base := self._latest.get(base_key)) is not None:
                check_own(base)
            return derived(base, whole.binding, states, direction == "backward", needed).text()

        what = f"the {direction} of '{self._holdings.forward.entry.name}'"
        meet = partial(self._context.left_out.agreed, key)  # no pass fails here: there is no graph
        if whole.leader == self._context.consensus.rank:
            meet()
        contract = Contract.parse(self._context.consensus.settle(key, what, decide, whole.leader, meet))
        contract = self._context.any_order.of(key, contract)
        check_own(contract)
        self.learn(whole.structure, direction, contract)
        return FollowedPass(whole, contract, direction)

    def learn_backward(self, structure: str, gathered: Iterable[str]) -> None:
        """Is told the FQNs of what the backward of a whole call gathers, if all is sharded."""
        self._needed[structure] = frozenset(gathered)

    def learn(self, structure: str, direction: str, contract: Contract) -> None:
        """Is told a contract: for states of which this rank has to decide without a graph, that with most counts."""
        key = (structure, direction)
        known = self._latest.get(key)
        if known is None or _size(contract) > _size(known):
            self._latest[key] = contract

    def end_backward(self) -> FollowedPass | None:
        """The running backward ends; returns what it has followed."""
        found, self.backward, self._backward_role, self._backward_id = self.backward, None, None, -1
        return found

    def end_forward(self) -> None:
        """The outermost call has ended, and all that it sent.

        Raises:
            RanksDiffer: ranks have used other parameters than each other, in a call that is in parts on all of them.
        """
        if self._is_in_legs:
            self._route.end(self._what, self._number)
        if self._running is not None and self.forward is not None:
            self._running.end_call(self.forward.uses)
        self._forget_forward()


def _is_leg(role: Role | None) -> bool:
    return role is not None and role.leg is not None


def _ordered(shards: Iterable[Shard]) -> Binding:
    return Binding(tuple(sorted(shards, key=lambda shard: (shard.unit.position, shard.index))))


def _size(contract: Contract) -> int:
    return sum(len(bucket.members) for bucket in contract.buckets)
