"""The store of a job, as one rank uses it: waits say whether they were in vain, errors of the store where they came."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

# Stores round a timeout.
_EARLY_S = 0.01
# Between questions: the more who waits has waited, so that of many ranks a store is not asked much.
_FIRST_PAUSE_S, _LAST_PAUSE_S, _PAUSE_PART = 0.001, 0.02, 0.02


class Store(Protocol):
    """What is asked of a store: every one of torch's does it."""

    def set(self, key: str, value: str, /) -> object:
        """Stores a value."""

    def get(self, key: str, /) -> bytes:
        """The value of a key that is there."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """The values of keys that are there."""

    def add(self, key: str, amount: int, /) -> int:
        """Adds to a number, atomically; 0 if it is not there. The sum."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Stores a value if `expected` is there, or, where that is empty, nothing, atomically. What is stored."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> object:
        """Waits until all keys are there."""

    def delete_key(self, key: str, /) -> object:
        """Forgets a key, which need not be there."""


class RankStore:
    """A store, in words of text.

    Args:
        store: to use.
        where: begins the message of an error of the store.
    """

    def __init__(self, store: Store, where: str) -> None:
        self._store = store
        self._where = where

    @contextmanager
    def _located(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            said = error.args[0] if error.args else ""
            error.args = (
                f"{self._where}: the store of the process group failed; see whether the process that holds it, most "
                f"often that of rank 0, still runs: {said}",
                *error.args[1:],
            )
            raise

    def set(self, key: str, value: str) -> None:
        """Stores a value."""
        with self._located():
            self._store.set(key, value)

    def get(self, key: str) -> str:
        """The value of a key that is there."""
        with self._located():
            return self._store.get(key).decode()

    def add(self, key: str, amount: int = 1) -> int:
        """Counts some more; how many there are then."""
        with self._located():
            return self._store.add(key, amount)

    def set_first(self, key: str, value: str) -> str:
        """Stores a value unless there is one; the one that is stored."""
        with self._located():
            return self._store.compare_set(key, "", value).decode()

    def has(self, *keys: str) -> bool:
        """Whether all keys are there."""
        with self._located():
            return self._store.check(list(keys))

    def wait(self, key: str, seconds: float) -> bool:
        """Waits until a key is there; False: it is not, in time."""
        end = time.monotonic() + seconds - _EARLY_S
        with self._located():
            try:
                self._store.wait([key], timedelta(seconds=max(seconds, 0.001)))
            except RuntimeError:  # each store has an error of its own for a deadline
                if self._store.check([key]):
                    return True
                if time.monotonic() < end:
                    raise  # no deadline: the store itself is gone
                return False
        return True

    def ask(self, key: str, seconds: float) -> bool:
        """The same by asking again and again, where a wait may often be in vain: torch warns of each."""
        begin, pause_s = time.monotonic(), _FIRST_PAUSE_S
        while not self.has(key):
            waited_s = time.monotonic() - begin
            if waited_s >= seconds:
                return False
            time.sleep(min(pause_s, seconds - waited_s))
            pause_s = min(2 * pause_s, max(_LAST_PAUSE_S, waited_s * _PAUSE_PART))
        return True

    def delete(self, *keys: str) -> None:
        """Forgets keys, in this order; they need not be there."""
        with self._located():
            for key in keys:
                self._store.delete_key(key)

    def absent(self, keys: Sequence[str]) -> list[str]:
        """Those keys that are not there: few questions where few are missing."""
        if not keys or self.has(*keys):
            return []
        if len(keys) == 1:
            return list(keys)
        middle = len(keys) // 2
        return [*self.absent(keys[:middle]), *self.absent(keys[middle:])]
