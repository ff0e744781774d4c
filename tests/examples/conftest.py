"""Two ranks for the tests of this folder, and what they do on each: what torchrun sets, a fresh accelerate."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from graphshard.testing import WorkerPool, pool, shutdown_pools


@pytest.fixture(scope="session", autouse=True)
def _end_workers() -> Iterator[None]:
    yield
    shutdown_pools()


@pytest.fixture(scope="session")
def two_ranks() -> WorkerPool:
    return pool(2)


@pytest.fixture(autouse=True)
def _verify_as_users_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in tests/dist: level 2 would take most of the time."""
    monkeypatch.setenv("GRAPHSHARD_VERIFY", "1")
