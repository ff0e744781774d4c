"""Ranks compare, through the store, what must be the same on all of them, before it is relied on.

Each rank posts its own and reads those of the others: no collective, which would hang where the ranks differ.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist

from graphshard.compat import resolve_process_group
from graphshard.compat_store import default_store
from graphshard.errors import RanksDiffer

# Ranks are at most as far apart as one region's compilation, since the collectives of the last pass kept them together.
DEADLINE_S = 60.0

_DIGEST_BYTES = 16
# Backends whose other ranks are pretended: torch's, and that of `bench.loopback`.
WITHOUT_PEERS = ("fake", "loopback")


class Store(Protocol):
    """What is asked of a store."""

    def set(self, key: str, value: str, /) -> object:
        """Stores a value."""

    def add(self, key: str, amount: int, /) -> int:
        """Adds to a number, at once; returns the sum."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Values of keys that are there."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> object:
        """Waits until all keys are there."""


@dataclass(frozen=True)
class Posted:
    """What one rank has posted for the ranks of one group.

    Attributes:
        store: where.
        key: of the post, without the rank.
        what: in words.
        rank: this rank.
        ranks: all of the group.
        lines: entries, in order.
        subject: what the lines are, in words.
        advice: what to do where they differ.
    """

    store: Store
    key: str
    what: str
    rank: int
    ranks: tuple[int, ...]
    lines: tuple[str, ...]
    subject: str = "the order of their regions"
    advice: str = "want the same calls on every rank, so look for a branch or a graph break that depends on the rank"

    def compare(self, deadline_s: float = DEADLINE_S) -> None:
        """Compares with what the other ranks have posted.

        Raises:
            RanksDiffer: another rank has other lines, or none until the deadline.
        """
        others = [rank for rank in self.ranks if rank != self.rank]
        own = _digest(self.lines)
        found = self._get(others, "digest", deadline_s)
        for rank, digest in zip(others, found, strict=True):
            if digest != own:
                (text,) = self._get([rank], "text", deadline_s)
                raise RanksDiffer(self._difference(rank, text.decode().split("\n")))

    def _get(self, ranks: list[int], part: str, deadline_s: float) -> list[bytes]:
        keys = [f"{self.key}/{rank}/{part}" for rank in ranks]
        end = time.monotonic() + deadline_s
        try:
            self.store.wait(keys, timedelta(seconds=max(deadline_s, 0.001)))
        except RuntimeError:  # each store has an error of its own for a deadline
            if time.monotonic() < end and not self.store.check(keys):
                raise  # the store itself is gone
            missing = [rank for rank, key in zip(ranks, keys, strict=True) if not self.store.check([key])]
            if missing:
                raise RanksDiffer(
                    f"agreement: rank {self.rank} waited {deadline_s:g} s for {self.what} of {_ranks(missing)}, "
                    "which never came so far; want the same calls on every rank"
                ) from None
        return self.store.multi_get(keys)

    def _difference(self, rank: int, theirs: Sequence[str]) -> str:
        ours = self.lines
        place = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
        if place is None:
            place = min(len(ours), len(theirs))
        mine, other = (lines[place] if place < len(lines) else "the end" for lines in (ours, theirs))
        return (
            f"agreement: {self.what}: ranks differ in {self.subject}, first in place {place}: "
            f"got {mine!r} on rank {self.rank} and {other!r} on rank {rank}; {self.advice}"
        )


def post(
    store: Store, key: str, what: str, rank: int, ranks: Sequence[int], lines: Sequence[str], **words: str
) -> Posted:
    """Posts the lines of this rank. `words`: subject and advice of `Posted`."""
    # Text first: who sees the digest finds the text.
    store.set(f"{key}/{rank}/text", "\n".join(lines))
    store.set(f"{key}/{rank}/digest", _digest(lines).decode())
    return Posted(store, key, what, rank, tuple(ranks), tuple(lines), **words)


_posts: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def post_to_group(group_name: str, what: str, lines: Sequence[str], **words: str) -> Posted | None:
    """Posts lines for the ranks of a process group; None where there is nobody to compare with.

    `words`: subject and advice of `Posted`.
    """
    group = resolve_process_group(group_name)
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) < 2 or without_peers(group):
        return None
    # The ranks of a group post in the same order: their collectives keep it.
    number = _posts[group] = _posts.get(group, -1) + 1
    key = f"graphshard/agreement/{group_name}/{number}"
    return post(default_store(), key, what, dist.get_rank(), ranks, lines, **words)


def without_peers(group: dist.ProcessGroup | None) -> bool:
    """Whether the other ranks of a process group, by default that of all ranks, are pretended."""
    return dist.get_backend(group) in WITHOUT_PEERS


def _digest(lines: Sequence[str]) -> bytes:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[: 2 * _DIGEST_BYTES].encode()


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
