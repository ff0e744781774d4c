"""Notices when the graphs of this rank are not those of the other ranks, and has it follow their contracts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from graphshard.calls import Backward
from graphshard.compat import backward_id
from graphshard.contract import Contract
from graphshard.contracts import Contracts
from graphshard.derived import derived
from graphshard.dispatch import Binding, UnitState
from graphshard.errors import RanksDiffer
from graphshard.following import Following
from graphshard.fsdp2 import Unit
from graphshard.holdings import Holdings
from graphshard.ir import Direction
from graphshard.report import Report
from graphshard.shards import Shard
from graphshard.signatures import WholeCall, program_key, state_text
from graphshard.states import backward_states, forward_states

KEPT = "units kept for backward"


class Engine(Protocol):
    """What matters here of the engine of a model."""

    report: Report
    holdings: Holdings
    contracts: Contracts

    def chooses_kept(self, units: frozenset[Unit]) -> bool:
        """Whether it is planned which of `units` stay gathered from forward to backward."""

    @property
    def shards(self) -> Iterable[Shard]:
        """All of the model."""


class _AllOf:
    """What matters of a backward graph that gathers and reduces all parameters of a call."""

    def __init__(self, binding: Binding) -> None:
        self.gathered = frozenset(range(len(binding.shards)))
        self.last_gathered: int | None = None
        self.reduced = {slot: slot for slot, shard in enumerate(binding.shards) if shard.leaf.requires_grad}


class Follower:
    """What one rank knows of the calls that other ranks make as a whole.

    Args:
        engine: of the model.
        is_on: whether calls can be whole at all.
    """

    def __init__(self, engine: Engine, is_on: bool) -> None:
        self._engine = engine
        self._is_on = is_on and engine.contracts.has_peers
        self._leaders: dict[tuple[str, str], int | None] = {}
        self._wholes: dict[tuple[str, str], WholeCall] = {}
        self._mixed: set[tuple[str, str]] = set()  # where ranks use other parameters than each other
        self._latest: dict[tuple[str, str], Contract] = {}
        self.forward: Following | None = None
        self.backward: Following | None = None
        self._backward_id = -1
        self.outside: set[Shard] = set()  # read outside any graph, their gradients still to come

    def begin_forward(self) -> None:
        """An outermost call begins."""
        if not self._engine.holdings.in_backward:
            self.forward = None

    def whole(self, direction: Direction, structure: str) -> WholeCall | None:
        """The call that a region is the whole of; None: of none."""
        found = self._wholes.get((self._engine.holdings.entry.name, str(direction)))
        return found if found is not None and found.structure == structure else None

    def is_whole(self, broken: bool) -> bool:
        """Whether the region that runs now is all of what the user called."""
        holdings = self._engine.holdings
        return not (broken or holdings.nested or holdings.regions_run)

    def of_forward(self, direction: Direction, binding: Binding, structure: str, broken: bool) -> Following | None:
        """What a region's forward follows; None: it is the whole call, or all ranks have such parts.

        Args:
            direction: ``"forward"`` or ``"inference"``.
            binding: its shards.
            structure: its own (see `signatures`).
            broken: whether a graph break ends it.
        """
        holdings = self._engine.holdings
        if holdings.in_backward:
            return self.backward
        if self.forward is not None or not (self._is_on and binding.units):
            return self.forward
        is_whole = self.is_whole(broken)
        key = (holdings.entry.name, str(direction))
        what = f"the {direction} of '{holdings.entry.name}'"
        if key not in self._leaders:
            self._meet(key, what, direction, binding, structure if is_whole else "")
        if (leader := self._leaders[key]) is None:
            return None
        if is_whole and key not in self._mixed:
            if (known := self._wholes.get(key)) is None or known.binding is not binding:
                self._wholes[key] = WholeCall(structure, binding, leader)
            return None
        whole = self._wholes.get(key)
        if whole is None or not frozenset(binding.shards) <= frozenset(whole.binding.shards):
            return None
        if not is_whole:
            self._engine.report.note_once(
                f"{what}: graph breaks leave parts of what was one graph: they gather and reduce bucket by bucket, in "
                "the order of the whole"
            )
        self.forward = self._following(whole, str(direction), forward_states(holdings, whole.binding))
        return self.forward

    def _meet(self, key: tuple[str, str], what: str, direction: Direction, binding: Binding, structure: str) -> None:
        """Learns how the first call of a kind is on the other ranks. `structure`: of the whole call; empty: a part."""
        contracts = self._engine.contracts
        election = contracts.elect(f"leader\n{what}", what, structure)
        self._leaders[key] = leader = election.leader
        if leader is None:
            return
        names = [shard.fqn for shard in binding.shards]
        if not election.alike:  # a part of the model that some ranks do not use: they gather it all the same
            self._mixed.add(key)
            self._engine.report.note_once(
                f"{what}: ranks use other parameters than each other: each gathers and reduces those of all, zeros for "
                "what it does not use"
            )
            used = contracts.union(f"used\n{what}", what, names if structure else [])
            self._wholes[key] = self._whole_of(f"mixed {what}", [name for name in used if name], leader)
            return
        text = contracts.settle(f"whole\n{what}", what, lambda: json.dumps([structure, names]), leader)
        if not structure:
            said, names = json.loads(text)
            other = self._wholes[key] = self._whole_of(said, names, leader)
            if direction == "forward" and self._engine.chooses_kept(other.binding.unit_set):
                self._keep_units(other)

    def _keep_units(self, whole: WholeCall) -> None:
        """Lets the units stay gathered for backward that the deciding rank lets stay."""

        def decide() -> str:
            raise AssertionError("a rank without the whole graph does not lead its first call")

        text = self._engine.contracts.settle(program_key(KEPT, whole.structure, ""), KEPT, decide, whole.leader)
        if (names := json.loads(text)) is not None:
            self._engine.holdings.decide({unit: unit.name in names for unit in whole.binding.units})

    def _whole_of(self, structure: str, names: list[str], leader: int) -> WholeCall:
        by_name = {shard.fqn: shard for shard in self._engine.shards}
        if missing := [name for name in names if name not in by_name]:
            raise RanksDiffer(f"contract: rank {leader} has a parameter '{missing[0]}', which this rank lacks")
        shards = sorted((by_name[name] for name in names), key=lambda shard: (shard.unit.position, shard.index))
        binding = Binding(tuple(shards))
        return WholeCall(structure, binding, leader)

    def of_backward(self, asked: Backward) -> Following | None:
        """What the running backward follows; None: nothing, as its forward."""
        if (number := backward_id()) != self._backward_id:
            self._backward_id, self.backward = number, None
        if self.backward is None and asked.follows_whole:
            self.backward = self.extending(asked)
        return self.backward

    def reads_outside(self, shard: Shard) -> WholeCall | None:
        """Is told that a parameter is read outside any graph; returns the call that this is a part of, if it is."""
        if self.forward is None:
            return None
        if torch.is_grad_enabled() and shard.leaf.requires_grad:
            self.outside.add(shard)
        return self.forward.whole

    def outside_backward(self, shard: Shard, whole: WholeCall | None) -> None:
        """Is told that the gradient of such a read is there."""
        self.outside.discard(shard)
        if whole is not None:
            self.of_backward(Backward(whole=whole, follows_whole=True))

    def extending(self, asked: Backward) -> Following | None:
        """What a backward of a whole call follows, whose graph sends less than others'; None: it is no whole call."""
        if asked.whole is None:
            return None
        binding, nothing = asked.whole.binding, frozenset[int]()
        usual = Backward(asked.entry, inputs_only=asked.inputs_only)
        graph = _AllOf(binding)
        dead = frozenset(graph.reduced) if asked.inputs_only else nothing
        states = backward_states(self._engine.holdings, graph, binding, usual, dead, frozenset(), frozenset())
        return self._following(asked.whole, "backward", states)

    def _following(self, whole: WholeCall, direction: str, states: Sequence[UnitState]) -> Following:
        state = state_text(whole.binding, states, direction == "backward")
        key = program_key(direction, whole.structure, state)
        base_key = (whole.structure, direction)

        def decide() -> str:
            return derived(self._latest.get(base_key), whole.binding, states, direction == "backward").text()

        what = f"the {direction} of '{self._engine.holdings.entry.name}'"
        contract = Contract.parse(self._engine.contracts.settle(key, what, decide, whole.leader))
        self.learn(whole.structure, direction, contract)
        return Following(whole, contract)

    def learn(self, structure: str, direction: str, contract: Contract) -> None:
        """Is told a contract: for states of which this rank has to decide without a graph, that with most counts."""
        key = (structure, direction)
        known = self._latest.get(key)
        if known is None or _size(contract) > _size(known):
            self._latest[key] = contract

    def end_backward(self) -> Following | None:
        """The running backward ends; returns what it has followed."""
        found, self.backward, self._backward_id = self.backward, None, -1
        self.outside.clear()
        return found

    def end_forward(self) -> Following | None:
        """The outermost call ends; returns what it has followed."""
        found, self.forward = self.forward, None
        return found


def _size(contract: Contract) -> int:
    return sum(len(bucket.members) for bucket in contract.buckets)
