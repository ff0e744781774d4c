"""Which of a program's bodies a rank compiles first, where the ranks of a host share a cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from graphshard.lowering.bodies import Key, _first_to_last, _in_turn


def stretch(*targets: str) -> Any:
    return SimpleNamespace(nodes=[SimpleNamespace(target=target) for target in targets])


# In the order in which they are compiled: of no two the operators are nearly the same.
KEYS: dict[Key, Any] = {
    (f"body {number}", None, False): stretch(*(f"{number}.{i}" for i in range(9 - number))) for number in range(6)
}


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def on(rank: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Key]:
    """The order of one rank, which has found its place when this returns, and begun its first body."""
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    order = _in_turn(KEYS)
    first = next(order)

    def all_of_it() -> Iterator[Key]:
        yield first
        yield from order

    return all_of_it()


@pytest.mark.usefixtures("cache")
def test_fast_rank_takes_over_what_a_slow_one_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = on(0, 2, monkeypatch), on(1, 2, monkeypatch)
    keys = list(KEYS)
    assert next(slow) == keys[0]  # and compiles it for long
    assert list(fast) == [*keys[1:], keys[0]]
    assert list(slow) == keys[1:]  # all that is left is in the cache


@pytest.mark.usefixtures("cache")
def test_what_ranks_that_died_had_begun_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(3):
        next(on(rank, 3, monkeypatch))
    assert set(on(1, 3, monkeypatch)) == set(KEYS)


def test_bodies_like_a_larger_one_come_last() -> None:
    block = ["mm", "relu", "add", "mm", "tanh"]
    missing: dict[Key, Any] = {
        ("small",): stretch("embedding"),
        ("block and something",): stretch(*block, "exp"),
        ("block",): stretch(*block),
        ("head",): stretch("mm", "log", "sum"),
    }
    assert _first_to_last(missing) == [("block and something",), ("head",), ("small",), ("block",)]
    assert _first_to_last(dict(reversed(missing.items()))) == _first_to_last(missing)


def test_rank_compiles_all_without_a_cache_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("no folder")
    keys = list(KEYS)
    assert list(on(0, 2, monkeypatch)) == list(on(1, 2, monkeypatch)) == keys
    assert caplog.text.count("what other ranks compile cannot be told") == 1


def test_one_rank_alone_and_disabled_caches_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    assert list(on(0, 1, monkeypatch)) == list(KEYS)
    with cast(Any, torch.compiler.config).patch(force_disable_caches=True):
        list(on(1, 2, monkeypatch))
    assert not list(cache.rglob("*.begun"))
