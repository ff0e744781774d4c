"""Decisions that all ranks of a model share: made once, by one rank, posted in the store, taken over by the others.

What a rank sends must not depend on what it alone has traced. So whoever is asked first decides nothing: the lowest
rank does, from its own graph, and its word holds for every program that any rank lowers later.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from graphshard.agreement import Store, without_peers
from graphshard.compat_store import default_store
from graphshard.errors import RanksDiffer

# As long as the deciding rank may take to come to the same program: the time-out of NCCL's collectives.
DEADLINE_S = 600.0

_DECIDED, _FAILED = "+", "-"


class Contracts:
    """The decisions of one model, by key.

    Args:
        store: that ranks share; None: there are no others.
        prefix: of keys in the store, the same on every rank.
        rank: this rank.
        leader: the rank that decides.
        deadline_s: most seconds to wait for it.
    """

    def __init__(
        self, store: Store | None, prefix: str = "", rank: int = 0, leader: int = 0, deadline_s: float = DEADLINE_S
    ) -> None:
        self._store = store
        self._prefix = prefix
        self.rank = rank
        self.leader = leader
        self.deadline_s = deadline_s
        self._decided: dict[str, str] = {}

    @property
    def leads(self) -> bool:
        """Whether this rank decides."""
        return self._store is None or self.rank == self.leader

    def settle(self, key: str, what: str, decide: Callable[[], str]) -> str:
        """The decision on `key`.

        Args:
            key: the same on every rank; of any length.
            what: in words, for errors.
            decide: makes the decision, on the rank that leads.

        Raises:
            RanksDiffer: the leader has decided nothing until the deadline, or could not.
        """
        if (found := self._decided.get(key)) is None:
            found = self._decided[key] = self._lead(key, decide) if self.leads else self._follow(key, what, decide)
        return found

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{hashlib.sha256(key.encode()).hexdigest()[:32]}"

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

    def _follow(self, key: str, what: str, decide: Callable[[], str]) -> str:
        assert self._store is not None
        name, end = self._name(key), time.monotonic() + self.deadline_s
        try:
            self._store.wait([name], timedelta(seconds=self.deadline_s))
        except RuntimeError as error:  # each store has an error of its own for a deadline
            if time.monotonic() < end and not self._store.check([name]):
                raise RuntimeError(f"contract: {what}: the store of the process group failed: {error}") from error
            raise RanksDiffer(
                f"contract: rank {self.rank} waited {self.deadline_s:g} s for rank {self.leader} to come to {what}, "
                "which it never did; want the same calls, flags and modules in use on every rank"
            ) from None
        (posted,) = self._store.multi_get([name])
        text = posted.decode()
        if text.startswith(_FAILED):
            decide()  # what is wrong there is most likely wrong here, too, and says more
            raise RanksDiffer(f"contract: rank {self.leader} could not lower {what}: {text[1:]}")
        return text[1:]


def contracts_of(model: str, ranks: Sequence[int], group: dist.ProcessGroup | None = None) -> Contracts:
    """Those of a model that `ranks` share, this one among them."""
    if len(ranks) < 2 or without_peers(group):
        return Contracts(None)
    names = hashlib.sha256(",".join(map(str, sorted(ranks))).encode()).hexdigest()[:12]
    return Contracts(default_store(), f"graphshard/contract/{names}/{model}", dist.get_rank(), min(ranks))
