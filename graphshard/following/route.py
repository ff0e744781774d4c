"""The legs of a call that no rank has in one graph: the regions that it goes through, and parameters read between them.

A leg that has come apart on this rank alone, because its graph breaks in another place than before, is not heard of on
the others. So where a part of a call uses some of what the last call's leg in its place used, ranks ask each other
whether all take it so (see `variants`); if not, the part follows what is sent for that leg.

Programs of equal blocks are one program: ranks that run them for other blocks than each other would mix their
parameters and never notice. So what a call used is compared between ranks when it changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Protocol

from graphshard.agree.agreement import first_difference
from graphshard.agree.consensus import Consensus
from graphshard.errors import RanksDiffer
from graphshard.following.followed_pass import FollowedPass
from graphshard.following.variants import ASKED_TIMES
from graphshard.fsdp2 import Unit
from graphshard.state.binding import Binding
from graphshard.state.calls import BackwardRequest
from graphshard.state.marked_graph import MarkedGraph, Program
from graphshard.state.shards import Shard
from graphshard.state.signatures import Role, WholeCall

_SUBJECT = "the units that they use, in order, and the parameters of each"
_ADVICE = (
    "this call has mixed parameters: do not step on its gradients. Graph breaks leave parts of it on every rank "
    "(TORCH_LOGS=graph_breaks shows them): want the same modules in use on all ranks, or "
    "set_reduce_scatter_unused_params(True) on these units, or no breaks"
)
_FIRST_ADVICE = (
    "graph breaks leave parts of this call on every rank (TORCH_LOGS=graph_breaks shows them): want the same ones on "
    "all, or set_reduce_scatter_unused_params(True) on units of which ranks use other parameters"
)


class LegPrograms(Protocol):
    """What is asked of what selects the programs of a region."""

    def known_as(self, leg: Leg) -> FollowedPass | None:
        """What was sent when a leg last ran, for a part that is compiled now; None: it cannot be followed."""

    def enter(self, leg: Leg) -> FollowedPass:
        """Does what ranks do before the program of a leg; returns what they send then."""

    def enter_backward(self, leg: Leg, asked: BackwardRequest) -> FollowedPass:
        """The same of its backward."""


@dataclass(eq=False)
class Leg:
    """A region of a call.

    Attributes:
        programs: its.
        structure: of its forward (see `signatures`).
        graph: of its forward.
        binding: its shards.
        program: that ran.
    """

    programs: LegPrograms
    structure: str
    graph: MarkedGraph
    binding: Binding
    program: Program

    def role(self, follows: bool) -> Role:
        """What a run of it is to the other ranks. `follows`: in parts."""
        return Role(WholeCall(self.structure, self.binding, None, self.graph.direction), follows, self)


class Route:
    """The routes of a model's calls.

    Args:
        consensus: of the model.
        say: takes a note.
        split: units that are gathered and reduced as a whole, whatever of them is used.

    Attributes:
        current: the leg of the running call whose parts run.
    """

    def __init__(self, consensus: Consensus, say: Callable[[str], None], split: Container[Unit] = ()) -> None:
        self._consensus = consensus
        self._say = say
        self._split = split
        self._latest: dict[str, tuple[Leg | Shard, ...]] = {}  # by what the calls are, in words
        self._running: list[Leg | Shard] = []
        self._answers: dict[tuple[int, frozenset[Shard]], bool] = {}  # of the running call
        self._checked = 0  # legs of the running call
        self._compiled: Binding | None = None  # the last of them, until it runs
        self._alike: Counter[str] = Counter()
        self._differ: set[str] = set()
        self.current: Leg | None = None

    def begin(self) -> None:
        """A call begins."""
        self._running, self._answers, self._checked, self._compiled, self.current = [], {}, 0, None, None

    def use(self, used: Leg | Shard) -> None:
        """A leg runs, or a parameter is read outside any graph."""
        self._running.append(used)
        self.current = None

    def enter(self, leg: Leg) -> None:
        """A leg begins of which this rank has parts."""
        self._running.append(leg)
        self.current = leg

    def leg_of(self, what: str, number: int, binding: Binding, structure: str) -> Leg | None:
        """The leg that something belongs to which is about to run; None: it is one of its own.

        Args:
            what: the call is, in words.
            number: of the call, the same on every rank.
            binding: its shards.
            structure: its own (see `signatures`); empty: it is read outside any graph.
        """
        own = binding.shard_set
        if self.current is not None and own <= self.current.binding.shard_set:
            return self.current
        place, latest = len(self._running), self._latest.get(what, ())
        leg = latest[place] if place < len(latest) else None
        if not isinstance(leg, Leg) or structure == leg.structure:
            return None
        if not own <= leg.binding.shard_set:
            is_known = any(isinstance(other, Leg) and own <= other.binding.shard_set for other in latest)
            if structure and not is_known:
                self._check_all_go_on(what, number, binding, structure, leg)
            return None
        if leg.programs.known_as(leg) is None:
            return None
        if (place, own) not in self._answers:
            taken = structure or f"reads {', '.join(shard.fqn for shard in binding.shards)}"
            comes = what not in self._differ and self._all_come(what, f"call {number}, leg {place}", taken)
            self._answers[place, own] = comes
            if not comes:
                self._follows(what)
        return None if self._answers[place, own] else leg

    def _check_all_go_on(self, what: str, number: int, binding: Binding, structure: str, leg: Leg) -> None:
        """A leg goes on to parameters that the last call's in its place did not use: it had ended in a graph break.

        Raises:
            RanksDiffer: on other ranks it still does. What they send would be mixed.
        """
        own, place = binding.shard_set, len(self._running)
        more = [shard for shard in binding.shards if shard not in leg.binding.shard_set]
        if all(shard.unit.reduce_unused for shard in more) or self._answers.get((place, own)):
            return
        self._answers[place, own] = self._all_come(what, f"call {number}, leg {place}", structure)
        if not self._answers[place, own]:
            fqns = ", ".join(shard.fqn for shard in more[:3]) + (", ..." if len(more) > 3 else "")
            raise RanksDiffer(
                f"agreement: call {number}, leg {place} of {what}: on rank {self._consensus.rank} one graph goes on to "
                f"{fqns}, where the call before had left them to other graphs, and not all ranks come to such a one; "
                f"{_FIRST_ADVICE}"
            )

    def check_first(self, what: str, number: int, binding: Binding, runs: bool) -> None:
        """Compares what a leg of the first call of its kind uses, before anything is decided or sent for it.

        Args:
            what: the call is, in words.
            number: of the call, the same on every rank.
            binding: its shards.
            runs: whether it is about to run; else it is compiled, and runs then.

        Raises:
            RanksDiffer: another rank uses other parameters there, or does not come until the deadline.
        """
        names = [shard.fqn for shard in binding.shards if not shard.unit.reduce_unused]
        compiled, self._compiled = self._compiled, None if runs else binding
        if what in self._latest or not names or (compiled is not None and compiled.shard_set == binding.shard_set):
            return
        self._checked += 1
        where = f"call {number}, leg {self._checked} of {what}"
        if not self._consensus.elect(where, where, " ".join(sorted(names))).alike:
            lines = _lines(binding.shards)
            self._consensus.compare(f"differs\n{where}", where, lines, _SUBJECT, _FIRST_ADVICE)

    def _all_come(self, what: str, where: str, structure: str) -> bool:
        """Whether all ranks have come to such a graph in place of the last call's leg."""
        if self._alike[structure] >= ASKED_TIMES:
            return True
        met = self._consensus.meet(f"{where}\n{what}", what, structure, self._consensus.patience_s)
        if met is not None and met.alike:
            self._alike[structure] += 1
            return True
        return False

    def _follows(self, what: str) -> None:
        """From now on parts of such calls follow."""
        if what in self._differ:
            return
        self._differ.add(what)
        self._say(
            f"{what}: graph breaks leave parts of what was one graph: they gather and reduce bucket by bucket, in the "
            "order of the whole"
        )

    def end(self, what: str, number: int) -> None:
        """The call has ended.

        Args:
            what: it is, in words.
            number: of the call, the same on every rank.

        Raises:
            RanksDiffer: it used other parameters than the call before it, and on another rank others.
        """
        route, latest = tuple(self._running), self._latest.get(what, ())
        self.begin()
        self._latest[what] = route
        if _same(route, latest):
            return
        lines, before = (_lines(found, self._split) for found in (route, latest))
        if lines == before:
            return
        try:
            self._consensus.compare(f"route {number}\n{what}", f"call {number}, {what}", lines, _SUBJECT, _ADVICE)
        except RanksDiffer as error:  # the other ranks, if they do as before, do not come
            advice = "" if _ADVICE in str(error) else f"; {_ADVICE}"
            used = f"on rank {self._consensus.rank} it uses {_change(before, lines)}"
            raise RanksDiffer(f"{error}; {used}{advice}") from None


def _same(route: tuple[Leg | Shard, ...], other: tuple[Leg | Shard, ...]) -> bool:
    return len(route) == len(other) and all(
        a is b or (isinstance(a, Leg) and isinstance(b, Leg) and a.binding is b.binding)
        for a, b in zip(route, other, strict=True)
    )


def _change(before: list[str], lines: list[str]) -> str:
    """The first difference between two calls, in words."""
    place = first_difference(before, lines)
    old, new = (repr(found[place]) if place < len(found) else "nothing more" for found in (before, lines))
    return f"{new} in place {place}, where the call before used {old}"


def _lines(route: Iterable[Leg | Shard], split: Container[Unit] = ()) -> list[str]:
    """A line for each use of a unit: by a leg, or of split units, of which all is sent, by legs and reads that follow
    one another, as long as none of these legs runs again.
    """
    uses: list[tuple[str, set[str]]] = []
    last, legs = "", set[tuple[int, frozenset[Shard]]]()  # unit and legs of the last use
    for used in route:
        shards = used.binding.shards if isinstance(used, Leg) else (used,)
        shards = tuple(shard for shard in shards if not shard.unit.reduce_unused)  # gathered as a whole, for this
        leg = (id(used.graph), used.binding.shard_set) if isinstance(used, Leg) else None
        if leg is not None and shards and (leg in legs or shards[0].unit not in split):
            last = ""
        for shard in shards:
            if (unit := shard.unit.name or "root") != last:
                last = unit
                uses.append((unit, set()))
                legs.clear()
            uses[-1][1].add("all of it" if shard.unit in split else shard.fqn)
        if leg is not None:
            legs.add(leg)
    return [f"{unit}: {', '.join(sorted(fqns))}" for unit, fqns in uses]
