"""Ranks compare their orders through a store."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from graphshard.agreement import Posted, Store, post
from graphshard.errors import RanksDiffer

RANKS = (0, 1, 4)


def posted(lines: dict[int, list[str]]) -> dict[int, Posted]:
    """What each rank has posted, in one store."""
    store: Store = dist.HashStore()  # type: ignore[attr-defined]
    return {rank: post(store, "key", "Net0: forward", rank, RANKS, own) for rank, own in lines.items()}


def test_equal_ranks_agree() -> None:
    for found in posted({rank: ["a", "b"] for rank in RANKS}).values():
        found.compare(1.0)


@pytest.mark.parametrize(
    ("theirs", "place", "entries"),
    [
        (["a", "x", "c"], 1, ("'b'", "'x'")),
        (["a"], 1, ("'b'", "'the end'")),
        (["a", "b", "c", "d"], 3, ("'the end'", "'d'")),
    ],
)
def test_first_difference_is_named_on_every_rank(theirs: list[str], place: int, entries: tuple[str, str]) -> None:
    ours = ["a", "b", "c"]
    for rank, found in posted({0: ours, 1: ours, 4: theirs}).items():
        with pytest.raises(RanksDiffer, match=f"Net0: forward: .* first in place {place}") as error:
            found.compare(1.0)
        mine, other = entries[::-1] if rank == 4 else entries
        assert f"got {mine} on rank {rank} and {other} on rank {0 if rank == 4 else 4}" in str(error.value)


def test_rank_that_posts_nothing_is_named() -> None:
    found = posted({0: ["a"], 1: ["a"]})
    for rank in (0, 1):
        with pytest.raises(RanksDiffer, match=rf"rank {rank} waited 0\.05 s for .*Net0: forward of rank 4, which"):
            found[rank].compare(0.05)


def test_error_of_the_store_itself_is_no_difference() -> None:
    class Gone:
        def set(self, key: str, value: str) -> None:
            pass

        def multi_get(self, keys: list[str]) -> list[bytes]:
            return []

        def check(self, keys: list[str]) -> bool:
            return False

        def wait(self, keys: list[str], timeout: timedelta) -> None:
            raise RuntimeError("connection lost")

    with pytest.raises(RuntimeError, match="connection lost") as error:
        post(Gone(), "key", "Net0", 0, RANKS, ["a"]).compare(60.0)
    assert not isinstance(error.value, RanksDiffer)
