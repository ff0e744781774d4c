"""Decisions that all ranks of a model share: made once, by one rank, posted in the store, taken over by the others.

What a rank sends must not depend on what it alone has traced. So whoever is asked first decides nothing: the lowest
rank does, from its own graph, and its word holds for every program that any rank lowers later.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch.distributed as dist

from graphshard.agree.agreement import Posted, post, without_peers
from graphshard.agree.rank_store import RankStore, Store
from graphshard.compat.store import default_store
from graphshard.errors import RanksDiffer

# As long as the deciding rank may take to come to the same program: the time-out of NCCL's collectives.
DEADLINE_S = 600.0
# Where ranks come at about the same time, or one of them never does: so long the others are waited for.
PATIENCE_S = 10.0

_DECIDED, _FAILED, _LATE = "+", "-", "late"
# How often it is looked whether a rank that is waited for compiles.
_LOOK_S = 60.0
# So many ranks are asked whether they compile, of those that are waited for.
_ASKED = 8


@dataclass(frozen=True)
class Election:
    """How one ended: the leader, None where no rank stood; whether all that stood did so for the same."""

    leader: int | None
    alike: bool


class Consensus:
    """The decisions of one model, by key.

    Args:
        store: that ranks share; None: there are no others.
        prefix: of keys in the store, the same on every rank.
        rank: this rank.
        ranks: all of them; the lowest decides, where no other was elected.
        deadline_s: most seconds to wait for another rank that is not busy.
        posted: what ranks compare at the first decision; its number tells the decisions of a job that was started
            again from those of the run before, whose store is still there. None: there was none before.

    Attributes:
        is_busy: says of a rank whether it compiles, and does not wait itself: it is waited for.
        waiting: around a wait: tells the others.
        waited: of what is said of a wait in vain for some ranks makes what is said of it, and of what they are doing.
    """

    def __init__(
        self,
        store: RankStore | None,
        prefix: str = "",
        rank: int = 0,
        ranks: Sequence[int] = (0,),
        deadline_s: float = DEADLINE_S,
        posted: Posted | None = None,
    ) -> None:
        self._store = store
        self._posted = posted
        self._prefix = prefix
        self.rank = rank
        self.ranks = tuple(sorted(ranks))
        self.deadline_s = deadline_s
        self.is_busy: Callable[[int], bool] = lambda rank: False
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        self.waited: Callable[[str, Sequence[int]], str] = lambda said, missing: said
        self._decided: dict[str, str] = {}

    @property
    def patience_s(self) -> float:
        """How long to wait for ranks that may never come: they stand in a collective, whose deadline is not to pass."""
        return min(PATIENCE_S, self.deadline_s / 4)

    @property
    def has_peers(self) -> bool:
        """Whether there are other ranks."""
        return self._store is not None

    def settle(
        self,
        key: str,
        what: str,
        decide: Callable[[], str],
        leader: int | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> str:
        """The decision on `key`.

        Args:
            key: the same on every rank; of any length.
            what: in words, for errors.
            decide: makes the decision, on the rank that leads.
            leader: that rank; None: the lowest.
            meanwhile: is called first on a rank that does not lead, whether it would have to wait or not.

        Raises:
            RanksDiffer: the leader has decided nothing until the deadline, or could not.
        """
        if (found := self._decided.get(key)) is None:
            leader = self.ranks[0] if leader is None else leader
            leads = self._store is None or self.rank == leader
            found = self._lead(key, decide) if leads else self._follow(key, what, decide, leader, meanwhile)
            self._decided[key] = found
        return found

    def elect(self, key: str, what: str, stands: str) -> Election:
        """Elects the lowest rank that stands. All ranks take part.

        Args:
            key: the same on every rank.
            what: in words, for errors.
            stands: what this rank stands for; empty: it does not stand.

        Raises:
            RanksDiffer: a rank did not come until the deadline.
        """
        found = self.meet(key, what, stands)
        assert found is not None
        return found

    def meet(self, key: str, what: str, stands: str, patience_s: float | None = None) -> Election | None:
        """The same, with no ranks but those that have a reason to; each does a constant number of operations.

        Args:
            key: as of `elect`.
            what: as of `elect`.
            stands: as of `elect`.
            patience_s: most seconds to wait for the others; None: all must come until the deadline.

        Returns:
            None: not all came in time, on any rank that came.

        Raises:
            RanksDiffer: a rank did not come until the deadline, where all must.
        """
        if self._store is None:
            return Election(self.rank if stands else None, True)
        name = self._name(key)
        self._store.set(f"{name}/{self.rank}", _DECIDED + (_digest(stands) if stands else ""))
        if self._store.add(f"{name}/count") == len(self.ranks):
            self._store.set_first(name, self._counted(name))
        keys = {f"{name}/{rank}": rank for rank in self.ranks}
        if not self._wait(name, keys, self.deadline_s if patience_s is None else patience_s):
            if patience_s is None:
                raise self._never_came(what, [keys[key] for key in self._store.absent(list(keys))])
            self._store.set_first(name, _LATE)
        return _election(self._store.get(name))

    def union(self, key: str, words: Collection[str], patience_s: float) -> frozenset[str] | None:
        """All words of all ranks that come; the same on each of them.

        Args:
            key: the same on every rank.
            words: of this rank, without spaces.
            patience_s: most seconds to wait for ranks that do not compile.

        Returns:
            None: not all came in time, on any rank that came, now or later.
        """
        if self._store is None:
            return frozenset(words)
        name = self._name(key)
        self._store.set(f"{name}/{self.rank}", _DECIDED + " ".join(sorted(words)))
        if self._store.add(f"{name}/count") == len(self.ranks):
            said = [self._store.get(f"{name}/{rank}").removeprefix(_DECIDED) for rank in self.ranks]
            self._store.set_first(name, _DECIDED + " ".join(sorted({word for one in said for word in one.split()})))
        if not self._wait(name, {f"{name}/{rank}": rank for rank in self.ranks}, patience_s):
            self._store.set_first(name, _LATE)
        text = self._store.get(name)
        return None if text == _LATE else frozenset(text.removeprefix(_DECIDED).split())

    def met(self, key: str) -> Election | None:
        """What ranks say at the latest: None if one that has met no other in time has still not come."""
        if self._store is None:
            return None
        name = self._name(key)
        said = self._counted(name) if self._store.add(f"{name}/count", 0) == len(self.ranks) else _LATE
        return _election(self._store.set_first(f"{name}/last", said))

    def compare(self, key: str, what: str, lines: Sequence[str], subject: str, advice: str) -> None:
        """Compares lines. All ranks take part.

        Args:
            key: the same on every rank.
            what: in words.
            lines: entries, in order.
            subject: what they are, in words.
            advice: what to do where they differ.

        Raises:
            RanksDiffer: they do, or a rank did not come until the deadline.
        """
        if self._store is None:
            return
        posted = Posted(self._store, self._name(key), what, self.rank, self.ranks, tuple(lines), subject, advice)
        if self.rank == posted.lead:
            posted.show()
        posted.compare(self.deadline_s, self.waited)

    def _counted(self, name: str) -> str:
        """The lowest rank that stands, for how many different things ranks stand. The last to come reads that."""
        assert self._store is not None
        said = [(rank, self._store.get(f"{name}/{rank}").removeprefix(_DECIDED)) for rank in self.ranks]
        standing = {rank: found for rank, found in said if found}
        return f"{_DECIDED}{min(standing, default='')} {len(set(standing.values()))}"

    def _name(self, key: str) -> str:
        if self._posted is not None:
            self._posted.compare(self.deadline_s, self.waited)
            self._prefix, self._posted = f"{self._prefix}/{self._posted.drawn}", None
        return f"{self._prefix}/{_digest(key)}"

    def _lead(self, key: str, decide: Callable[[], str]) -> str:
        try:
            found = decide()
        except Exception as error:
            if self._store is not None:
                self._store.set(self._name(key), f"{_FAILED}{type(error).__name__}: {error}")
            raise
        if self._store is not None:
            self._store.set(self._name(key), _DECIDED + found)
        return found

    def _follow(
        self, key: str, what: str, decide: Callable[[], str], leader: int, meanwhile: Callable[[], object] | None
    ) -> str:
        assert self._store is not None
        name = self._name(key)
        if meanwhile is not None:
            meanwhile()
        if not self._wait(name, {name: leader}, self.deadline_s):
            raise self._never_came(what, [leader])
        text = self._store.get(name)
        if text.startswith(_FAILED):
            decide()  # what is wrong there is most likely wrong here, too, and says more
            raise RanksDiffer(f"contract: rank {leader} could not lower {what}: {text[1:]}")
        return text[1:]

    def _wait(self, name: str, keys: Mapping[str, int], seconds: float) -> bool:
        """Whether a key is there in time; a rank that compiles, and whose own of `keys` is missing, is waited for
        longer.
        """
        assert self._store is not None
        begin = idle_since = time.monotonic()
        with self.waiting():
            while not self._came(name, seconds):
                now = time.monotonic()
                missing = [keys[key] for key in self._store.absent(list(keys)[:_ASKED]) if keys[key] != self.rank]
                if any(map(self.is_busy, missing)) and now - begin < max(self.deadline_s, DEADLINE_S):
                    idle_since = now
                if now - idle_since >= seconds:
                    return False
        return True

    def _came(self, name: str, seconds: float) -> bool:
        """Whether a key is there, or comes in a while."""
        assert self._store is not None
        if seconds > _LOOK_S:
            return self._store.wait(name, _LOOK_S)
        return self._store.ask(name, seconds)

    def _never_came(self, what: str, missing: Sequence[int]) -> RanksDiffer:
        ranks = ("rank " if len(missing) == 1 else "ranks ") + ", ".join(map(str, missing))
        said = f"waited {self.deadline_s:g} s for {ranks} to come to {what}, which never came so far"
        told = self.waited(f"contract: rank {self.rank} {said}", missing)
        return RanksDiffer(
            f"{told}; want the same calls, flags and modules in use on every rank, or, of units whose parameters some "
            "ranks use and others do not, set_reduce_scatter_unused_params(True)"
        )


def _election(text: str) -> Election | None:
    if text == _LATE:
        return None
    leader, _, kinds = text.removeprefix(_DECIDED).partition(" ")
    return Election(int(leader) if leader else None, int(kinds) < 2)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def consensus_of(model: str, ranks: Sequence[int], group: dist.ProcessGroup | None = None) -> Consensus:
    """Those of a model that `ranks` share, this one among them."""
    if len(ranks) < 2 or without_peers(group):
        return Consensus(None)
    names = hashlib.sha256(",".join(map(str, sorted(ranks))).encode()).hexdigest()[:12]
    return posted_consensus(default_store(), f"graphshard/contract/{names}/{model}", model, dist.get_rank(), ranks)


def posted_consensus(store: Store, prefix: str, model: str, rank: int, ranks: Sequence[int]) -> Consensus:
    """The same, with a store. The lowest rank shows at once that it is there."""
    posted = post(store, prefix, f"the contracts of {model}", rank, ranks, [model], subject="the models they compile")
    return Consensus(RankStore(store, f"contract: rank {rank}"), prefix, rank, ranks, posted=posted)
