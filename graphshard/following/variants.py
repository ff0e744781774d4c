"""Calls of one kind that use other parameters than the first one, or need others again in backward: early exits,
branches, experts that nobody asks for.

A rank cannot see whether the others take the same branch. So it says in the store which one it takes, and waits a
little. If all come, the call is theirs: what it does not use is not sent, and gets no gradient. If not, it sends what
the ranks that never asked send, with zeros where it computes nothing; so do all that asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from graphshard.agree.consensus import Consensus
from graphshard.graph.ir import Direction
from graphshard.state.binding import Binding
from graphshard.state.signatures import Role, WholeCall

# So often ranks ask about a variant that all of them take; then it is one that they take alike.
ASKED_TIMES = 3


@dataclass(frozen=True)
class _Question:
    """Whether all ranks took a variant, where not all said so in time."""

    key: str
    role: Role
    own: WholeCall


class Variants:
    """Calls of one kind: of one entry, with gradients or without.

    Args:
        consensus: of the model.
        what: the calls, in words.
        primary: the call that ranks make which never ask.
        everything: makes the call that uses all parameters below the called module.
        say: takes a note.

    Attributes:
        what: as given.
        primary: as given; then the widest call that all ranks have made.
        usual: how many programs of this rank use each parameter of a call in which it follows, the most so far.
    """

    def __init__(
        self,
        consensus: Consensus,
        what: str,
        primary: WholeCall,
        everything: Callable[[], WholeCall],
        say: Callable[[str], None],
    ) -> None:
        self._consensus = consensus
        self.what = what
        self.primary = primary
        self._everything = everything
        self._say = say
        self._differ = False
        self._alike: Counter[str] = Counter()
        self._question: _Question | None = None
        self.usual: dict[str, float] = {}

    def role(self, binding: Binding, structure: str, number: int, direction: Direction) -> Role:
        """What a call is that one graph covers on this rank.

        Args:
            binding: its shards.
            structure: its own (see `signatures`).
            number: of the call among those of its entry, the same on every rank.
            direction: of its graph.

        Raises:
            RanksDiffer: it uses what the primary call does not, and not all ranks came to it until the deadline.
        """
        self._question = None
        if structure == self.primary.structure:
            if self.primary.binding is not binding:
                self.primary = replace(self.primary, binding=binding)
            return Role(self.primary, follows=False)
        own = WholeCall(structure, binding, self.primary.leader, direction)
        fits = frozenset(binding.shards) <= frozenset(self.primary.binding.shards)
        if fits and self._differ:
            return Role(self.primary, follows=True)
        if self._alike[structure] >= ASKED_TIMES:
            return Role(own, follows=False)
        key = f"call {number}\n{self.what}"
        patience_s = self._consensus.patience_s if fits else None
        met = self._consensus.meet(key, self.what, structure, patience_s)
        if met is None:
            role = Role(self.primary, follows=True)
            self._question = _Question(key, role, own)
            return role
        if met.alike:
            self._taken_by_all(own)
            return Role(own, follows=False)
        self.differs(by_all=True)
        return Role(self.primary, follows=True)

    def end_call(self, uses: Mapping[str, float]) -> None:
        """A call that follows has ended: all that it sent has arrived, so who made the same call has said so.

        Args:
            uses: how many programs have used each parameter.
        """
        self.usual |= {fqn: max(count, self.usual.get(fqn, 0)) for fqn, count in uses.items()}
        question, self._question = self._question, None
        if question is None:
            return
        if (device := question.own.binding.device) is not None and device.type != "cpu":
            torch.accelerator.synchronize(device)
        met = self._consensus.met(question.key)
        if met is None or not met.alike:
            self.differs(by_all=met is not None)
            return
        self._taken_by_all(question.own)
        question.role.whole, question.role.follows = question.own, False

    def _taken_by_all(self, own: WholeCall) -> None:
        self._alike[own.structure] += 1
        if frozenset(own.binding.shards) > frozenset(self.primary.binding.shards):
            self.primary = own

    def differs(self, by_all: bool) -> None:
        """Ranks use other parameters than each other from now on.

        Args:
            by_all: whether all ranks know; then all take part in whatever any may use.
        """
        self._differ = True
        self._say(
            f"{self.what}: ranks use other parameters than each other, or need others again in backward: each gathers "
            "and reduces those of all, zeros for what it does not use"
        )
        if by_all and not frozenset((whole := self._everything()).binding.shards) <= frozenset(
            self.primary.binding.shards
        ):
            self.primary = whole
