"""Ranks compare their orders through a store."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from datetime import timedelta

import pytest
import torch.distributed as dist
from store_double import CountingStore, on_ranks

from graphshard.agree import agreement
from graphshard.agree.agreement import Posted, group_key, post
from graphshard.agree.rank_store import Store
from graphshard.errors import RanksDiffer

RANKS = (0, 1, 4)
MANY = tuple(range(1024))
# Operations: of each rank, and of one that looks who is missing.
EACH, ONE = 14, 64


def new_store() -> Store:
    return dist.HashStore()  # type: ignore[attr-defined, no-any-return]


def posted(lines: dict[int, list[str]], store: Store | None = None, key: str = "key") -> dict[int, Posted]:
    """What each rank has posted, in one store."""
    store = store or new_store()
    return {rank: post(store, key, "Net0: forward", rank, RANKS, own) for rank, own in lines.items()}


def compared(posts: dict[int, Posted], deadline_s: float = 10.0) -> dict[int, str]:
    """What each rank is told, all at once; ``""``: they are alike."""
    raised = on_ranks(posts, lambda rank: posts[rank].compare(deadline_s))
    assert all(error is None or isinstance(error, RanksDiffer) for error in raised.values()), raised
    return {rank: str(error or "") for rank, error in sorted(raised.items())}


def many(lines: dict[int, list[str]], deadline_s: float) -> tuple[dict[int, str], CountingStore]:
    """The same for 1,024 ranks, of which those in `lines` post; with the store that counted."""
    shared = CountingStore(expected=len(lines.keys() - {MANY[0]}))
    told = compared(
        {rank: post(shared.of(rank), "key", "Net0", rank, MANY, own) for rank, own in lines.items()}, deadline_s
    )
    return told, shared


def assert_few(operations: Iterable[int], ranks: int) -> None:
    counts = list(operations)
    assert sum(counts) <= EACH * ranks + ONE
    assert sorted(counts)[-2] <= EACH, "some ranks ask more than others"
    assert max(counts) <= EACH + ONE


def test_equal_ranks_agree() -> None:
    assert compared(posted({rank: ["a", "b"] for rank in RANKS})) == dict.fromkeys(RANKS, "")


@pytest.mark.parametrize("odd", RANKS)
@pytest.mark.parametrize(
    ("theirs", "place", "entries"),
    [
        (["a", "x", "c"], 1, ("'b'", "'x'")),
        (["a"], 1, ("'b'", "'the end'")),
        (["a", "b", "c", "d"], 3, ("'the end'", "'d'")),
    ],
)
def test_first_difference_is_named_on_every_rank(
    odd: int, theirs: list[str], place: int, entries: tuple[str, str]
) -> None:
    told = compared(posted({rank: theirs if rank == odd else ["a", "b", "c"] for rank in RANKS}))
    others = {rank for rank in RANKS if rank != odd}
    for rank, text in told.items():
        assert text.startswith(
            f"agreement: Net0: forward: ranks differ in the order of their regions, first in place {place}"
        )
        mine, other = entries[::-1] if rank == odd else entries
        with_rank = {odd} if rank != odd else others
        assert any(f"got {mine} on rank {rank} and {other} on rank {peer};" in text for peer in with_rank), text


def test_ranks_that_all_differ_are_told_so() -> None:
    for rank, text in compared(posted({rank: [f"of {rank}"] for rank in RANKS})).items():
        assert f"got 'of {rank}' on rank {rank} and 'of " in text


@pytest.mark.parametrize("absent", RANKS)
def test_rank_that_never_comes_is_named(absent: int) -> None:
    told = compared(posted({rank: ["a"] for rank in RANKS if rank != absent}), 0.2)
    for text in told.values():  # of its own wait, or of that of the rank that gave up first
        assert re.search(rf"rank [{''.join(map(str, told))}] waited 0.2 s for Net0: forward of rank {absent}, ", text)


def test_who_waited_in_vain_says_what_the_missing_ranks_do() -> None:
    posts = posted({0: ["a"], 1: ["a"]})
    raised = on_ranks(posts, lambda rank: posts[rank].compare(0.2, lambda said, ranks: f"{said}: asked {ranks}"))
    said = "of rank 4, which never came so far: asked [4]; want "
    assert any(said in str(error) for error in raised.values()), raised


def test_all_ranks_that_never_come_are_named() -> None:
    for present, absent in ((0, "ranks 1, 4"), (1, "ranks 0, 4"), (4, "ranks 0, 1")):
        assert f"of {absent}, which never came" in compared(posted({present: ["a"]}), 0.1)[present]


def test_rank_that_came_is_not_missing_where_the_lead_is() -> None:
    store, ranks = new_store(), (0, 1, 2, 3)
    told = compared({rank: post(store, "key", "Net0", rank, ranks, ["a"]) for rank in (1, 2)}, 0.5)
    assert all("of ranks 0, 3, which never came" in text for text in told.values()), told


def test_lead_that_posts_but_never_compares_is_named() -> None:
    posts = posted({rank: ["a"] for rank in RANKS})
    del posts[0]
    assert all("of rank 0, which never came" in text for text in compared(posts, 0.2).values())


def test_rank_that_differs_is_told_so_although_the_lead_never_compares() -> None:
    posts = posted({0: ["a"], 1: ["a"], 4: ["b"]})
    del posts[0]
    told = compared(posts, 0.2)
    assert "got 'b' on rank 4 and 'a' on rank 0" in told[4]
    assert "got 'a' on rank 1 and 'b' on rank 4" in told[1]


@pytest.mark.parametrize("late", RANKS)
def test_rank_that_comes_after_the_others_gave_up_raises_too(late: int) -> None:
    store = new_store()
    compared(posted({rank: ["a"] for rank in RANKS if rank != late}, store), 0.2)
    text = compared(posted({late: ["a"]}, store), 0.3)[late]
    if late == 0:  # nobody saw its lines
        assert "of ranks 1, 4, which never came" in text
    else:
        assert f"rank {late} came too late with Net0: forward: rank " in text
        assert "had waited 0.2 s" in text


def test_what_differs_is_told_again_at_once() -> None:
    posts = posted({0: ["a"], 1: ["b"]})
    first = compared(posts, 0.5)
    begin = time.monotonic()
    assert compared(posts, 60.0) == first
    assert time.monotonic() - begin < 5.0


# -- groups


def test_sibling_groups_of_one_name_have_keys_of_their_own() -> None:
    store = new_store()
    posts = {
        rank: post(store, group_key("7", ranks, 0), f"stage of {ranks}", rank, ranks, [str(ranks)])
        for ranks in ((0, 1), (2, 3))
        for rank in ranks
    }
    assert compared(posts) == dict.fromkeys(range(4), "")


# -- restarts: the store keeps what earlier runs have left in it


@pytest.fixture
def restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that earlier runs may have used, as torchrun tells its processes."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setattr(agreement, "NEWER_RUN_S", 1.0)


EARLIER: dict[str, dict[int, list[str]]] = {
    "alike": {0: ["a"], 1: ["a"], 4: ["a"]},
    "alike, in other lines": {0: ["z"], 1: ["z"], 4: ["z"]},
    "different": {0: ["a"], 1: ["a"], 4: ["b"]},
    "without 4": {0: ["a"], 1: ["a"]},
    "without the lead": {1: ["a"], 4: ["a"]},
    "with the lead alone": {0: ["z"]},
}


@pytest.mark.usefixtures("restarted")
@pytest.mark.parametrize("earlier", EARLIER)
@pytest.mark.parametrize("last", [0, 4])
def test_run_is_not_told_what_an_earlier_one_left(earlier: str, last: int) -> None:
    store = new_store()
    compared(posted(EARLIER[earlier], store), 0.1)

    def run(lines: dict[int, list[str]]) -> dict[int, str]:
        def call(rank: int) -> None:
            time.sleep(0.2 * (rank == last))  # the others find only what is old
            post(store, "key", "Net0: forward", rank, RANKS, lines[rank]).compare(30.0)

        begin = time.monotonic()
        told = {rank: str(error or "") for rank, error in on_ranks(RANKS, call).items()}
        assert time.monotonic() - begin < 20.0, "it waited for what is old"
        return told

    assert run({rank: ["a"] for rank in RANKS}) == dict.fromkeys(RANKS, "")
    told = run({0: ["a"], 1: ["c"], 4: ["a"]})
    assert all("'a'" in text and "'c' on rank 1" in text for text in told.values()), told


# -- many ranks


def test_operations_of_each_rank_do_not_grow_with_the_ranks() -> None:
    told, shared = many({rank: ["a"] for rank in MANY}, 60.0)
    assert set(told.values()) == {""}
    assert_few(shared.operations.values(), len(MANY))
    assert max(shared.operations.values()) <= EACH


@pytest.mark.parametrize("odd", [0, 700])
def test_operations_do_not_grow_where_one_rank_differs(odd: int) -> None:
    told, shared = many({rank: ["b" if rank == odd else "a"] for rank in MANY}, 60.0)
    assert all(
        f"on rank {rank}" in text and "'a' on rank" in text and "'b' on rank" in text for rank, text in told.items()
    )
    assert sum(f"on rank {odd}" in text for text in told.values()) == len(MANY)
    assert_few(shared.operations.values(), len(MANY))


@pytest.mark.parametrize("absent", [0, 700])
def test_operations_do_not_grow_where_one_rank_never_comes(absent: int) -> None:
    told, shared = many({rank: ["a"] for rank in MANY if rank != absent}, 0.5)
    assert len(told) == len(MANY) - 1
    assert all(f"of rank {absent}, which never came" in text for text in told.values())
    assert_few(shared.operations.values(), len(MANY))


# -- the store itself


class Gone:
    """A store whose process is gone."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def set(self, key: str, value: str) -> None:
        pass

    def get(self, key: str) -> bytes:
        raise self._error

    def add(self, key: str, amount: int) -> int:
        raise self._error

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        raise self._error

    def check(self, keys: list[str]) -> bool:
        return False

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        raise self._error


@pytest.mark.parametrize("error", [RuntimeError("connection lost"), dist.DistNetworkError("connection lost")])
@pytest.mark.parametrize("rank", [0, 1])
def test_error_of_the_store_itself_is_no_difference_and_says_where(error: RuntimeError, rank: int) -> None:
    with pytest.raises(type(error)) as caught:
        post(Gone(error), "key", "Net0", rank, RANKS, ["a"]).compare(60.0)
    assert caught.value is error
    assert str(error).startswith(f"agreement: rank {rank}, which compares Net0 with the other ranks: the store of the ")
    assert str(error).endswith(": connection lost")
