"""A rank in trouble asks the others, through the store, what they are doing. No collective: those are what hangs.

Questions are numbered. A rank's listener looks every `POLL_S` whether the next one is there: one `check` on a
connection of its own. A wait for the key would need no traffic, but could not be ended with the process, and torch
would write a warning in every healthy run in which the store's process ends first; now it does only where that ends a
poll earlier, without `destroy_process_group` on the others.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from uuid import uuid4

from graphshard.agree.rank_store import Store
from graphshard.faults.status import Status, from_json, to_json
from graphshard.files import parse_json

POLL_S = 2.0
# A live rank answers within one poll.
ANSWER_S = POLL_S + 0.6
# The store answers at once, or not at all.
STORE_S = 1.0
_STEP_S = 0.1
_PREFIX = "graphshard/watchdog"

T = TypeVar("T")


@dataclass(frozen=True)
class Question:
    """A question to all ranks.

    Attributes:
        number: counts from 1.
        rank: that asks.
        fault: its name.
        final: whether all ranks end afterwards.
    """

    number: int
    rank: int
    fault: str
    final: bool


def within(seconds: float, call: Callable[[], T]) -> T | None:
    """What `call` returns; None if it takes longer, or the store fails: it may be dead, or stopped."""
    found: list[T] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception:  # each store has errors of its own
            return

    thread = threading.Thread(target=run, daemon=True, name="graphshard store")
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def latest_question(store: Store) -> int:
    """The number of the last question asked so far."""
    return store.add(f"{_PREFIX}/asked", 0)


def latest_alarm(store: Store) -> str:
    """The last alarm so far; empty: there was none. The store of torchrun still has that of ranks that were ended."""
    key = f"{_PREFIX}/alarm"
    return store.multi_get([key])[0].decode() if store.check([key]) else ""


def raise_alarm(store: Store, rank: int, before: str) -> bool:
    """Whether this rank is the first to raise the alarm: it asks, and the others answer. `before`: the last alarm when
    this rank began.
    """
    alarm = f"{rank} {uuid4().hex}"
    return store.compare_set(f"{_PREFIX}/alarm", before, alarm) == alarm.encode()


def ask(store: Store, rank: int, fault: str, final: bool) -> Question:
    """Asks all ranks what they are doing."""
    number = store.add(f"{_PREFIX}/asked", 1)
    store.set(f"{_PREFIX}/{number}/question", json.dumps([rank, fault, final]))
    return Question(number, rank, fault, final)


def read_question(store: Store, number: int) -> Question | None:
    """The question of that number, if it was asked."""
    key = f"{_PREFIX}/{number}/question"
    if not store.check([key]):
        return None
    rank, fault, final = parse_json(store.multi_get([key])[0])
    return Question(number, int(rank), str(fault), bool(final))


def answer(store: Store, question: Question, status: Status) -> None:
    """Answers."""
    store.set(_answer_key(question, status.rank), to_json(status))


def answers(store: Store, question: Question, ranks: Sequence[int], deadline_s: float) -> dict[int, Status | None]:
    """What the others answer within `deadline_s` seconds; None for a rank that does not."""
    end = time.monotonic() + deadline_s
    keys = {rank: _answer_key(question, rank) for rank in ranks}
    while not store.check(list(keys.values())) and time.monotonic() < end:
        time.sleep(_STEP_S)
    there = [rank for rank, key in keys.items() if store.check([key])]
    texts = store.multi_get([keys[rank] for rank in there]) if there else []
    found: dict[int, Status | None] = dict.fromkeys(ranks)
    for rank, text in zip(there, texts, strict=True):
        found[rank] = from_json(parse_json(text))
    return found


def say_raised(store: Store, rank: int, text: str) -> None:
    """Leaves what the last error of this rank said, for those that ask when it has ended. Empty: there was none."""
    store.set(f"{_PREFIX}/raised/{rank}", text)


def read_raised(store: Store, ranks: Sequence[int]) -> dict[int, str]:
    """What the last errors of `ranks` said, of those that had one."""
    keys = {rank: f"{_PREFIX}/raised/{rank}" for rank in ranks}
    said = {rank: store.multi_get([key])[0].decode() for rank, key in keys.items() if store.check([key])}
    return {rank: text for rank, text in said.items() if text}


def close(store: Store, question: Question) -> None:
    """Lets those that answered a final question end: one of them may be the store's process."""
    store.set(f"{_PREFIX}/{question.number}/closed", "1")


def wait_closed(store: Store, question: Question, deadline_s: float) -> None:
    """Waits until the question is closed, or the deadline."""
    end = time.monotonic() + deadline_s
    while not store.check([f"{_PREFIX}/{question.number}/closed"]) and time.monotonic() < end:
        time.sleep(_STEP_S)


def say_compiling(store: Store, rank: int, what: str) -> None:
    """Says what this rank compiles; nothing: empty."""
    store.set(f"{_PREFIX}/compiles/{rank}", what)


# What a rank says begins so that waits, in a compilation, for what another one decides.
WAITS = "waits for another rank"


def say_alive(store: Store, rank: int, beats: str) -> None:
    """Says that this rank still compiles: another text each time. Empty: it does not."""
    store.set(f"{_PREFIX}/beats/{rank}", beats)


def read_compiling(store: Store, ranks: Sequence[int]) -> dict[int, bytes]:
    """Those of `ranks` that say that they compile, with what they say: the text changes while they are alive."""
    keys = {f"{_PREFIX}/{part}/{rank}": rank for rank in ranks for part in ("compiles", "beats")}
    there = list(keys) if store.check(list(keys)) else [key for key in keys if store.check([key])]
    said = store.multi_get(there) if there else []
    found: dict[int, bytes] = {}
    for key, text in zip(there, said, strict=True):
        if text:
            found[keys[key]] = found.get(keys[key], b"") + b" " + text
    return found


def _answer_key(question: Question, rank: int) -> str:
    return f"{_PREFIX}/{question.number}/answer/{rank}"
