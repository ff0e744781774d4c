"""A store in memory that counts what each of many threads, one per rank, asks of it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

STACK_BYTES = 256 * 1024  # there are a thousand threads
COME_S = 60.0


class CountingStore:
    """What the ranks share. `of` is the store of one rank.

    Args:
        expected: how many ranks count themselves before any may ask who is missing. On a slow machine a deadline
            passes before a thousand threads have come.
    """

    def __init__(self, expected: int = 0) -> None:
        self.expected = expected
        self.came: set[int] = set()
        self.all_came = threading.Event()
        self.values: dict[str, bytes] = {}
        self.arrived: dict[str, threading.Event] = {}
        self.lock = threading.Lock()
        self.operations: Counter[int] = Counter()

    def of(self, rank: int) -> RankView:
        return RankView(self, rank)


class RankView:
    """The store, as one rank uses it: each call is one operation."""

    def __init__(self, shared: CountingStore, rank: int) -> None:
        self._shared = shared
        self._rank = rank
        self._asked: list[str] = []

    def set(self, key: str, value: str) -> None:
        self._write(key, lambda _: value.encode())

    def add(self, key: str, amount: int) -> int:
        if not amount or key.endswith("/given_up"):
            assert not self._shared.expected or self._shared.all_came.wait(COME_S), "ranks have not come"
        total = int(self._write(key, lambda found: str(int(found or b"0") + amount).encode()))
        with self._shared.lock:
            self._shared.came.add(self._rank)
            if len(self._shared.came) == self._shared.expected:
                self._shared.all_came.set()
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        assert expected == ""
        return self._write(key, lambda found: desired.encode() if found is None else found)

    def get(self, key: str) -> bytes:
        self._count()
        return self._shared.values[key]  # torch's waits here: the agreement asks for what is there

    def check(self, keys: list[str]) -> bool:
        if keys != self._asked:  # to ask the same again is to wait
            self._asked = keys
            self._count()
        return all(key in self._shared.values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._count()
        for key in keys:
            if not self._event(key).wait(timeout.total_seconds()):
                raise RuntimeError("wait timeout")

    def delete_key(self, key: str) -> bool:
        self._count()
        with self._shared.lock:
            self._shared.arrived.pop(key, None)
            return self._shared.values.pop(key, None) is not None

    def _write(self, key: str, change: Callable[[bytes | None], bytes]) -> bytes:
        self._count()
        with self._shared.lock:
            value = self._shared.values[key] = change(self._shared.values.get(key))
        self._event(key).set()
        return value

    def _event(self, key: str) -> threading.Event:
        with self._shared.lock:
            return self._shared.arrived.setdefault(key, threading.Event())

    def _count(self) -> None:
        with self._shared.lock:
            self._shared.operations[self._rank] += 1


def on_ranks(ranks: Iterable[int], call: Callable[[int], object]) -> dict[int, BaseException | None]:
    """Calls a function for each rank, in a thread of its own, once all threads run; what each raised."""
    raised: dict[int, BaseException | None] = {}
    ranks = list(ranks)
    running = threading.Barrier(len(ranks))  # starting them takes longer than some deadlines

    def run(rank: int) -> None:
        try:
            running.wait(60.0)
            call(rank)
        except BaseException as error:
            raised[rank] = error
        else:
            raised[rank] = None

    before = threading.stack_size(STACK_BYTES)
    try:
        threads: Sequence[threading.Thread] = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threading.stack_size(before)
    return raised
