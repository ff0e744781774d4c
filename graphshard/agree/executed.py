"""What a rank has executed of a model's collectives, compared with the other ranks every so many calls.

What programs launch rolls into one hash per process group, collective by collective: ranks may do the same in other
programs. Nothing is sent for it but the comparison, through the store. Where ranks differ, they look for the first call
in which they do, by bisection, then for the first parameter in it.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist

from graphshard.agree.agreement import DEADLINE_S, Posted, group_key, post, without_peers
from graphshard.agree.consensus import Consensus
from graphshard.agree.rank_store import Store
from graphshard.compat.autograd import backward_id
from graphshard.compat.groups import resolve_process_group
from graphshard.compat.store import default_store
from graphshard.errors import RanksDiffer
from graphshard.fsdp2 import Unit
from graphshard.reporting.report import Launched, NamedShard, ProgramRecord

# Of so many calls it is known what they executed, and of each so many lines.
KEPT_CALLS, KEPT_LINES = 1000, 5000
_ADVICE = (
    "what was computed since then may be wrong: go back to a checkpoint of before it, and look for calls, flags or "
    "modules in use that depend on the rank (compare graphshard.report(model) of these ranks)"
)
_OF_GROUPS = {"subject": "what their process groups have found", "advice": "want the same on every rank"}
_NAMED_RANKS = 8


class _Sent(NamedTuple):
    """What one run of a program sends over one group: for the hash, and in words."""

    hashed: bytes
    lines: tuple[str, ...]


class _Call(NamedTuple):
    """What was executed since the last comparison until the end of a call (a hash), and in it; `more`: than is kept."""

    number: int
    until: str
    lines: tuple[tuple[str, ...], ...]
    more: str


class _Roll:
    """The rolling hash of one process group. `ranks`: in it."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.restart()

    def restart(self) -> None:
        """Begins anew, behind a comparison."""
        self._hash = hashlib.sha256()
        self.calls: deque[_Call] = deque(maxlen=KEPT_CALLS)
        self._begin()

    def _begin(self) -> None:
        self._lines: list[tuple[str, ...]] = []
        self._kept = self._dropped = 0
        self._rest = hashlib.sha256()

    def add(self, sent: _Sent) -> None:
        """A program has sent something."""
        self._hash.update(sent.hashed)
        if self._kept < KEPT_LINES:
            self._lines.append(sent.lines)
            self._kept += len(sent.lines)
        else:
            self._dropped += len(sent.lines)
            self._rest.update(sent.hashed)

    def end_call(self, number: int) -> None:
        """A call has ended, and its backward."""
        more = f"{self._dropped} more, hash {self._rest.hexdigest()[:8]}" if self._dropped else ""
        self.calls.append(_Call(number, self._hash.hexdigest(), tuple(self._lines), more))
        self._begin()


class Executed:
    """The collectives that one rank has executed of one model.

    Args:
        model: its name.
        every: after so many outermost calls, ranks compare.
        rank: this rank.
        groups: the ranks of each process group that the model's collectives go over, by name.
        ranks: all that hold a part of the model.
        store: in which ranks compare.
        waits: says how long to wait for another rank, beyond `agreement.DEADLINE_S`.
    """

    def __init__(
        self,
        model: str,
        every: int,
        rank: int,
        groups: Mapping[str, Sequence[int]],
        ranks: Sequence[int],
        store: Store,
        waits: Consensus,
    ) -> None:
        self._model = model
        self._every = every
        self._rank = rank
        # In one order on all ranks: those that wait for each other in different orders would wait in vain.
        self._rolls = {name: _Roll(groups[name]) for name in sorted(groups)}
        self._ranks = tuple(ranks)
        self._store = store
        self._waits = waits
        self._calls = 0
        self._sent: dict[tuple[int, ...], tuple[ProgramRecord, list[tuple[_Roll, _Sent]]]] = {}
        self._past: deque[list[Posted]] = deque(maxlen=3)

    def ran(self, record: ProgramRecord, shards: Sequence[NamedShard], half: int | None = None) -> None:
        """Is told of one run of a program.

        Args:
            record: of the program.
            shards: that it ran for. They live as long as the model.
            half: 0: as far as its first wait; 1: from there on; None: all of it.
        """
        key = (id(record), -1 if half is None else half, *map(id, shards))
        if (found := self._sent.get(key)) is None:
            found = self._sent[key] = (record, self._sent_by(record, shards, half))
        for roll, sent in found[1]:
            roll.add(sent)

    def _sent_by(
        self, record: ProgramRecord, shards: Sequence[NamedShard], half: int | None
    ) -> list[tuple[_Roll, _Sent]]:
        by_group: dict[str, list[tuple[str, ...]]] = {}
        for launched in record.launched_for(shards):
            if half in (None, int(launched.behind_wait)):
                by_group.setdefault(launched.group, []).append(_lines(launched))
        return [
            (self._rolls[name], _Sent(b"".join(map(_digest, found)), tuple(line for lines in found for line in lines)))
            for name, found in by_group.items()
            if name in self._rolls
        ]

    def begin_call(self) -> None:
        """An outermost call begins: what was executed so far is that of earlier calls.

        Raises:
            RanksDiffer: it is time to compare, and a rank has executed something else, or did not come until the
                deadline: on every rank.
        """
        if backward_id() != -1:  # a checkpoint is recomputed: ranks may be in the middle of other programs
            return
        number, self._calls = self._calls, self._calls + 1
        for roll in self._rolls.values():
            roll.end_call(number)
        if number and number % self._every == 0:
            try:
                self._compare(number)
            finally:
                for roll in self._rolls.values():
                    roll.restart()

    def _compare(self, number: int) -> None:
        what = f"{self._model}: the collectives of calls {number - self._every + 1} to {number}"
        posts: list[Posted] = []
        failure = ""
        for name, roll in self._rolls.items():
            posts.append(self._post(name, roll.ranks, f"{number}", what, [roll.calls[-1].until]))
            try:
                self._wait(posts[-1])
            except RanksDiffer:
                if not posts[-1].differs:
                    raise
                failure = failure or self._located(name, roll, number)
        if len(self._rolls) > 1:  # ranks that are alike within their groups learn of those that are not
            posts.append(self._post("", self._ranks, f"{number}", what, [failure or "alike"], **_OF_GROUPS))
            try:
                self._wait(posts[-1])
            except RanksDiffer as error:
                failure = failure or str(error)
        if failure:
            raise RanksDiffer(failure)
        self._forget(posts)

    def _located(self, name: str, roll: _Roll, number: int) -> str:
        """The first difference within a group whose ranks differ."""
        calls = roll.calls
        low, high = 0, len(calls) - 1
        subject = f"the collectives executed over {_named(roll.ranks)}"
        while low < high:
            middle = (low + high) // 2
            digest = [calls[middle].until]
            posted = self._post(name, roll.ranks, f"{number}/until {middle}", self._model, digest)
            if self._are_alike(posted):
                low = middle + 1
            else:
                high = middle
        call = calls[low]
        what = f"{self._model}: call {call.number}" if call.number else f"{self._model}: before its first call"
        lines = [line for lines in call.lines for line in lines]
        if call.more:
            lines.append(call.more)
        posted = self._post(name, roll.ranks, f"{number}/in", what, lines, subject=subject, advice=_ADVICE)
        if self._are_alike(posted):
            return f"agreement: {what}, or earlier: ranks differ in {subject}; {_ADVICE}"
        return posted.failure

    def _are_alike(self, posted: Posted) -> bool:
        """Raises:
        RanksDiffer: a rank did not come.
        """
        try:
            self._wait(posted)
        except RanksDiffer:
            if not posted.differs:
                raise
            return False
        return True

    def _post(
        self, name: str, ranks: Sequence[int], number: str, what: str, lines: Sequence[str], **words: str
    ) -> Posted:
        key = group_key(name, ranks, f"executed {self._model}/{number}")
        return post(self._store, key, what, self._rank, ranks, lines, **words)

    def _wait(self, posted: Posted) -> None:
        posted.compare(max(DEADLINE_S, self._waits.deadline_s), self._waits.waited)

    def _forget(self, posts: list[Posted]) -> None:
        """A store would fill up in a long run: takes out what no rank looks at any more."""
        self._past.append(posts)
        for age, leads in ((2, True), (3, False)):
            if len(self._past) >= age:
                for posted in self._past[-age]:
                    if (posted.lead == self._rank) is leads:
                        posted.forget()


def _lines(launched: Launched) -> tuple[str, ...]:
    """One line per parameter: so the first that differs is named."""
    op = f" ({launched.op})" if launched.op else ""
    count = len(launched.members)
    return tuple(
        f"{launched.kind}{op} of {launched.dtype} over {launched.ranks} ranks: {fqn} ({numel} elements), {i} of {count}"
        for i, (fqn, numel) in enumerate(launched.members, 1)
    )


def _digest(lines: Sequence[str]) -> bytes:
    return hashlib.sha256("\n".join(lines).encode()).digest()


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_NAMED_RANKS]))
    return f"ranks {shown}{', ...' if len(ranks) > _NAMED_RANKS else ''}"


def executed_of(model: str, every: int | None, units: Iterable[Unit], waits: Consensus) -> Executed | None:
    """That of a model; None: nothing is to be compared, or there is nobody to compare with.

    Args:
        model: its name.
        every: after so many outermost calls, ranks compare; None: never.
        units: of the model.
        waits: says how long to wait for another rank.
    """
    if every is None:
        return None
    groups: dict[str, Sequence[int]] = {}
    everyone: set[int] = set()
    for unit in units:
        everyone.update(unit.ranks)
        for name in unit.group_names:
            group = resolve_process_group(name)
            if name not in groups and dist.get_world_size(group) > 1 and not without_peers(group):
                groups[name] = dist.get_process_group_ranks(group)
    if not groups:
        return None
    return Executed(model, every, dist.get_rank(), groups, sorted(everyone), default_store(), waits)


def check_compare_every(compare_every: object) -> None:
    """Raises:
    TypeError: it is neither None nor an int.
    ValueError: it is not positive.
    """
    if compare_every is None:
        return
    if isinstance(compare_every, bool) or not isinstance(compare_every, int):
        raise TypeError(f"compile: compare_every: got {compare_every!r:.80}, want a number of calls, or None")
    if compare_every < 1:
        raise ValueError(f"compile: compare_every: got {compare_every}, want at least 1 call")
