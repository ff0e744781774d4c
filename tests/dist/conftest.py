"""Ranks for the tests of this folder: two and four, started when first used and alive until the session ends."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import FrameType

import pytest

from graphshard.testing import WorkerPool, pool, shutdown_pools

TEST_TIMEOUT_S = 300


@pytest.fixture(scope="session", autouse=True)
def _end_workers() -> Iterator[None]:
    yield
    shutdown_pools()


@pytest.fixture(scope="session")
def two_ranks() -> WorkerPool:
    return pool(2)


@pytest.fixture(scope="session")
def four_ranks() -> WorkerPool:
    return pool(4)


@pytest.fixture(autouse=True)
def _verify_as_users_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Level 2 takes nearly half of the passes' time: tests/graph and test_models.py have it."""
    monkeypatch.setenv("GRAPHSHARD_VERIFY", "1")


@pytest.fixture(autouse=True)
def _limit_time() -> Iterator[None]:
    """A second line: the pools' own deadlines are shorter and name a rank."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the test took more than {TEST_TIMEOUT_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(TEST_TIMEOUT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
