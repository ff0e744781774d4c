"""The store of a job, as one rank uses it."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from graphshard.agree.rank_store import RankStore


class Failing:
    """A store whose waits fail at once. `there`: whether the key is there then."""

    def __init__(self, there: bool) -> None:
        self.there = there
        self.checks = 0

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        raise RuntimeError("connection lost")

    def check(self, keys: list[str]) -> bool:
        self.checks += 1
        return self.there


def failing(there: bool) -> RankStore:
    return RankStore(Failing(there), "here")  # type: ignore[arg-type]


def test_wait_that_fails_before_its_deadline_is_no_deadline() -> None:
    with pytest.raises(RuntimeError, match=r"here: the store .* connection lost"):
        failing(there=False).wait("key", 60.0)
    assert failing(there=False).wait("key", 0.0) is False


def test_key_that_came_in_the_end_has_come() -> None:
    assert failing(there=True).wait("key", 60.0)


def test_absent_keys_are_found_with_few_questions() -> None:
    store = RankStore(dist.HashStore(), "here")  # type: ignore[attr-defined]
    keys = [f"key{i}" for i in range(9)]
    for key in keys[:8]:
        store.set(key, "")
    assert store.absent(keys) == keys[8:]
    full = Failing(there=True)
    assert RankStore(full, "here").absent(keys) == []  # type: ignore[arg-type]
    assert full.checks == 1
    assert RankStore(full, "here").absent([]) == []  # type: ignore[arg-type]
    assert full.checks == 1
