"""Ranks compare, through the store, what must be the same on all of them, before it is relied on.

No collective does it, which would hang where the ranks differ. The lowest rank of a group leads: it shows a digest of
its lines. The others compare, and count themselves. The last one, or the first that differs, calls the lead, whose
verdict all wait for: a handful of store operations on each rank, however many there are.

A store may outlive the processes: that of torchrun is still there after a restart, and the number of restarts that it
tells to processes differs between machines. So keys hold a number that the lead has drawn, and only the lead answers:
what is left of an earlier run is answered by nobody, and a rank looks for a newer lead while it waits.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch.distributed as dist

from graphshard.agree.rank_store import RankStore, Store
from graphshard.compat.groups import resolve_process_group
from graphshard.compat.store import default_store
from graphshard.errors import RanksDiffer

# Ranks are at most as far apart as one region's compilation, since the collectives of the last pass kept them together.
DEADLINE_S = 60.0
# How long after a deadline the rank that noticed it first may take to say who is missing.
GRACE_S = 5.0
# How long a rank that finds itself given up looks for the lead of a newer run, where there may be one.
NEWER_RUN_S = 60.0

_DIGEST_BYTES = 16
_FIRST_LOOK_S, _LAST_LOOK_S = 0.05, 1.0

Waited: TypeAlias = Callable[[str, Sequence[int]], str]


@dataclass
class Posted:
    """What one rank has to compare with the other ranks of one group.

    Attributes:
        store: where.
        key: of the comparison, the same on all ranks.
        what: in words.
        rank: this rank.
        ranks: all of the group.
        lines: entries, in order.
        subject: what the lines are, in words.
        advice: what to do where they differ.
        drawn: the lead's number; of other ranks, that of the lead that they have heard last.
        failure: what the comparison ended with, to be said again.
        differs: whether that was a difference between ranks, not a rank that did not come.
    """

    store: RankStore
    key: str
    what: str
    rank: int
    ranks: tuple[int, ...]
    lines: tuple[str, ...]
    subject: str = "the order of their regions"
    advice: str = "want the same calls on every rank, so look for a branch or a graph break that depends on the rank"
    drawn: str = ""
    failure: str = ""
    differs: bool = field(default=False, init=False)

    @property
    def lead(self) -> int:
        """The rank that the others compare with."""
        return min(self.ranks)

    def show(self) -> None:
        """Lets the other ranks see what the lead has."""
        self.drawn = uuid.uuid4().hex
        # Text first: who sees the digest finds the text.
        self.store.set(self._at(f"text/{self.lead}"), "\n".join(self.lines))
        self.store.set(f"{self.key}/lead", f"{self.drawn} {_digest(self.lines)}")

    def compare(self, deadline_s: float = DEADLINE_S, waited: Waited = lambda said, missing: said) -> None:
        """Compares with the other ranks; returns when all of them have come and are alike.

        Args:
            deadline_s: most seconds to wait for them.
            waited: of what is said of a wait in vain for some ranks makes what is said of it, and of what they are
                doing.

        Raises:
            RanksDiffer: a rank has other lines, or has not come until the deadline: on every rank of the group, also
                on one that comes later.
        """
        if not self.failure:
            begin = time.monotonic()
            verdict = self._answered(deadline_s) if self.rank == self.lead else self._heard(deadline_s)
            if verdict == "alike":
                return
            self.failure = self._told(verdict, deadline_s if time.monotonic() - begin >= deadline_s else None, waited)
        raise RanksDiffer(self.failure)

    def forget(self) -> None:
        """Takes out of the store what this rank has put there.

        Of the lead: once a later comparison of the same ranks has ended well. Of the others: once two have, since what
        they counted must outlive what the lead shows.
        """
        if self.rank != self.lead:
            self.store.delete(self._at(str(self.rank)), f"{self.key}/here/{self.rank}")
            return
        parts = ("verdict", "called", "alike", "given_up", f"text/{self.lead}")
        self.store.delete(*map(self._at, parts), f"{self.key}/here", f"{self.key}/lead")

    def _at(self, part: str) -> str:
        return f"{self.key}/{self.drawn}/{part}"

    def _answered(self, deadline_s: float) -> str:
        """The lead's part: a verdict, once it is called."""
        if not self.store.wait(self._at("called"), deadline_s):
            return self._given_up(deadline_s)
        return self.store.set_first(self._at("verdict"), self.store.get(self._at("called")))

    def _heard(self, deadline_s: float) -> str:
        """The part of the other ranks: the verdict of the lead of this run."""
        end = time.monotonic() + deadline_s
        shown = ""
        while newer := self._newer_lead(shown, end):
            shown = newer
            self.drawn, digest = shown.split()
            if self.store.add(self._at(str(self.rank))) > 1:
                continue  # this rank was there already, in an earlier run
            self._call(digest == _digest(self.lines))
            verdict = self._verdict(shown, end, deadline_s)
            if verdict.startswith("missing") and dist.is_torchelastic_launched():
                # The lead of this run, or one of an earlier run, in which this rank came to nothing?
                end = min(end, time.monotonic() + NEWER_RUN_S)
                verdict = "" if self._is_newer(shown, end) else verdict
            if verdict:
                return verdict
        return self._missing([self.lead, *self._absent_without_lead()], deadline_s)

    def _newer_lead(self, shown: str, end: float) -> str:
        """What a lead shows, other than `shown`; ``""``: nothing until `end`."""
        lead = f"{self.key}/lead"
        if shown:
            return self.store.get(lead) if self._is_newer(shown, end) else ""
        if not self.store.has(lead):
            self.store.set(f"{self.key}/here/{self.rank}", "")
            self.store.add(f"{self.key}/here")
            if not self.store.wait(lead, end - time.monotonic()):
                return ""
        return self.store.get(lead)

    def _is_newer(self, shown: str, end: float) -> bool:
        """Waits until a lead shows something else; False: none does until `end`."""
        look_s = _FIRST_LOOK_S
        while self.store.get(f"{self.key}/lead") == shown:
            if (left_s := end - time.monotonic()) <= 0:
                return False
            time.sleep(min(look_s, left_s))
            look_s = min(2 * look_s, _LAST_LOOK_S)
        return True

    def _call(self, alike: bool) -> None:
        """Counts this rank; calls the lead if it is the last one, or differs."""
        if not alike:
            self.store.set(self._at(f"text/{self.rank}"), "\n".join(self.lines))
            self.store.set_first(self._at("called"), f"differs {self.rank}")
        elif self.store.add(self._at("alike")) == len(self.ranks) - 1:
            self.store.set_first(self._at("called"), "alike")

    def _verdict(self, shown: str, end: float, deadline_s: float) -> str:
        """The verdict, which is given up behind `end`; ``""``: there is a newer lead."""
        look_s = _LAST_LOOK_S
        while not self.store.ask(self._at("verdict"), min(look_s, left_s := max(end - time.monotonic(), 0.0))):
            if self.store.get(f"{self.key}/lead") != shown:
                return ""
            if left_s <= look_s:
                return self._given_up(deadline_s)
            look_s *= 2
        return self.store.get(self._at("verdict"))

    def _given_up(self, deadline_s: float) -> str:
        """The verdict behind the deadline; only one rank looks who is missing."""
        verdict = self._at("verdict")
        if self.store.add(self._at("given_up")) > 1 and self.store.wait(verdict, GRACE_S):
            return self.store.get(verdict)
        called = self._at("called")
        if self.store.has(called) and (found := self.store.get(called)) != "alike":
            return self.store.set_first(verdict, found)
        came = {self._at(str(rank)): rank for rank in self.ranks if rank != self.lead}
        # All came, and there is no answer: the lead has shown its lines only.
        missing = [came[key] for key in self.store.absent(list(came))] or [self.lead]
        return self.store.set_first(verdict, self._missing(missing, deadline_s))

    def _absent_without_lead(self) -> list[int]:
        """Ranks that did not come either, where the lead never did."""
        if self.store.add(f"{self.key}/here", 0) >= len(self.ranks) - 1:
            return []
        here = {f"{self.key}/here/{rank}": rank for rank in self.ranks if rank not in (self.lead, self.rank)}
        return [here[key] for key in self.store.absent(list(here))]

    def _missing(self, ranks: Sequence[int], deadline_s: float) -> str:
        return f"missing {self.rank} {deadline_s:g} {','.join(map(str, ranks))}"

    def _told(self, verdict: str, waited_s: float | None, waited: Waited) -> str:
        """A verdict in words. `waited_s`: how long this rank waited in vain."""
        kind, by, *words = verdict.split()
        if kind == "differs":
            self.differs = True
            return self._difference(int(by))
        missing = [int(rank) for rank in words[1].split(",")]
        want = "want the same calls on every rank"
        if self.rank in missing:
            return (
                f"agreement: rank {self.rank} came too late with {self.what}: rank {by} had waited {words[0]} s "
                f"for it, and given up; {want}"
            )
        waits, seconds = (by, words[0]) if waited_s is None else (self.rank, f"{waited_s:g}")
        said = (
            f"agreement: rank {waits} waited {seconds} s for {self.what} of {_ranks(missing)}, which never came so far"
        )
        return f"{said if waited_s is None else waited(said, missing)}; {want}"

    def _difference(self, rank: int) -> str:
        """The first difference, to `rank`, which differs from the lead; of a rank that does too, to the lead."""
        if self.rank != self.lead and self.store.has(self._at(f"text/{self.rank}")):
            rank = self.lead
        ours, theirs = self.lines, self.store.get(self._at(f"text/{rank}")).split("\n")
        place = first_difference(ours, theirs)
        mine, other = (lines[place] if place < len(lines) else "the end" for lines in (ours, theirs))
        return (
            f"agreement: {self.what}: ranks differ in {self.subject}, first in place {place}: "
            f"got {mine!r} on rank {self.rank} and {other!r} on rank {rank}; {self.advice}"
        )


def first_difference(lines: Sequence[str], others: Sequence[str]) -> int:
    """The first place in which lines differ; the end of the shorter ones where they go on alike."""
    differ = (i for i, (one, other) in enumerate(zip(lines, others, strict=False)) if one != other)
    return next(differ, min(len(lines), len(others)))


def post(
    store: Store, key: str, what: str, rank: int, ranks: Sequence[int], lines: Sequence[str], **words: str
) -> Posted:
    """What this rank has to compare (see `Posted`); of the lead, the others see it from now on."""
    own = RankStore(store, f"agreement: rank {rank}, which compares {what} with the other ranks")
    posted = Posted(own, key, what, rank, tuple(ranks), tuple(lines), **words)
    if rank == posted.lead:
        posted.show()
    return posted


_posts: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def post_to_group(group_name: str, what: str, lines: Sequence[str], **words: str) -> Posted | None:
    """Posts lines for the ranks of a process group; None where there is nobody to compare with.

    Of several groups, begin with the one whose name comes first: ranks that wait for each other in different orders
    would wait in vain.

    `words`: subject and advice of `Posted`.
    """
    group = resolve_process_group(group_name)
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) < 2 or without_peers(group):
        return None
    # The ranks of a group post in the same order: their collectives keep it.
    number = _posts[group] = _posts.get(group, -1) + 1
    return post(default_store(), group_key(group_name, ranks, number), what, dist.get_rank(), ranks, lines, **words)


def without_peers(group: dist.ProcessGroup | None) -> bool:
    """Whether the other ranks of a process group, by default that of all ranks, are pretended.

    By torch's fake backend they are, and by a group of someone's own whose attribute `pretends_peers` is true.
    """
    if dist.get_backend(group) == "fake":
        return True
    return bool(getattr(dist.group.WORLD if group is None else group, "pretends_peers", False))


def group_key(group_name: str, ranks: Sequence[int], number: int | str) -> str:
    """The key of a comparison within a group. Groups that were split off together may have one name."""
    return f"graphshard/agreement/{group_name}/{_digest([str(sorted(ranks))])}/{number}"


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[: 2 * _DIGEST_BYTES]


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
