"""What one rank decides holds for all: through a store, in a constant number of operations on each rank."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from graphshard.agree.consensus import Consensus, Election, posted_consensus
from graphshard.agree.left_out import LeftOut
from graphshard.agree.rank_store import RankStore
from graphshard.errors import RanksDiffer


class Counting:
    """A store that counts what each thread, a rank, asks of it."""

    def __init__(self) -> None:
        self._store: Any = dist.HashStore()  # type: ignore[attr-defined]
        self._lock = threading.Lock()
        self.asked: Counter[int] = Counter()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*args: Any) -> Any:
            with self._lock:
                self.asked[threading.get_ident()] += 1
            return getattr(self._store, name)(*args)

        return ask


def ranks(count: int, store: Any = None, deadline_s: float = 5.0) -> list[Consensus]:
    store = RankStore(store or dist.HashStore(), "test")  # type: ignore[attr-defined]
    return [Consensus(store, "net", rank, range(count), deadline_s) for rank in range(count)]


def together(consensus: list[Consensus], call: Callable[[Consensus], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(consensus)) as pool:
        return list(pool.map(call, consensus))


def test_lowest_rank_decides_once_for_all() -> None:
    made: list[int] = []

    def settle(own: Consensus) -> str:
        def decide() -> str:
            made.append(own.rank)
            return f"of rank {own.rank}"

        return own.settle("key", "the forward", decide) + own.settle("key", "the forward", decide)

    assert together(ranks(3), settle) == ["of rank 0" * 2] * 3
    assert made == [0]


def test_elected_rank_decides_in_its_place() -> None:
    own = ranks(3)
    assert together(own, lambda c: c.settle("key", "it", lambda: str(c.rank), leader=2)) == ["2"] * 3


def test_lowest_rank_that_stands_is_elected() -> None:
    found = together(ranks(4), lambda c: c.elect("key", "it", "" if c.rank < 2 else "whole"))
    assert found == [Election(2, True)] * 4
    assert together(ranks(3), lambda c: c.elect("key", "it", "")) == [Election(None, True)] * 3


def test_ranks_that_stand_for_different_things_are_told() -> None:
    found = together(ranks(3), lambda c: c.elect("key", "it", f"whole {c.rank}"))
    assert found == [Election(0, False)] * 3


def test_ranks_that_meet_are_told_whether_they_are_alike() -> None:
    assert together(ranks(3), lambda c: c.meet("key", "it", "same", 5.0)) == [Election(0, True)] * 3
    assert together(ranks(2), lambda c: c.meet("key", "it", f"of {c.rank}", 5.0)) == [Election(0, False)] * 2


def test_rank_that_meets_nobody_in_time_decides_so_for_those_that_come_later() -> None:
    first, second, third = ranks(3)
    assert together([first, second], lambda c: c.meet("key", "it", "same", 0.1)) == [None, None]
    assert third.meet("key", "it", "same", 0.1) is None
    assert together([first, second, third], lambda c: c.met("key")) == [Election(0, True)] * 3


def test_ranks_that_wait_for_a_third_are_not_taken_to_be_busy() -> None:
    first, second, third = ranks(3)
    first.is_busy = second.is_busy = lambda rank: rank != third.rank
    assert together([first, second], lambda c: c.meet("key", "it", "same", 0.1)) == [None, None]


def test_what_ranks_have_said_at_the_latest_is_decided_once() -> None:
    first, second = ranks(2)
    assert first.meet("key", "it", "same", 0.1) is None
    assert first.met("key") is None
    assert second.meet("key", "it", "same", 0.1) is None
    assert (second.met("key"), first.met("key")) == (None, None)


def test_decision_that_never_comes_names_the_rank_and_the_program() -> None:
    _, late = ranks(2, deadline_s=0.1)
    with pytest.raises(RanksDiffer, match=r"rank 1 waited 0\.1 s for rank 0 to come to the backward of blocks\.1"):
        late.settle("key", "the backward of blocks.1", lambda: "")


def test_rank_that_never_comes_to_an_election_is_named() -> None:
    first, _, third = ranks(3, deadline_s=0.1)

    def elect(own: Consensus) -> None:
        with pytest.raises(RanksDiffer, match="for rank 1 to come to the forward"):
            own.elect("key", "the forward", "whole")

    together([first, third], elect)


def test_rank_that_compiles_is_waited_for_beyond_the_deadline() -> None:
    first, second = ranks(2, deadline_s=0.1)
    left = [True, True, True]
    second.is_busy = lambda rank: bool(left.pop()) if left else False

    def settle(own: Consensus) -> str:
        if own.rank == 0:
            threading.Event().wait(0.3)
        return own.settle("key", "it", lambda: "decided")

    assert together([first, second], settle) == ["decided"] * 2


def test_job_that_is_started_again_decides_anew_in_the_same_store() -> None:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    for run in ("first", "second"):
        own = [posted_consensus(store, "net", "Net0", rank, (0, 1)) for rank in range(2)]
        assert together(own, partial(settled, run=run)) == [f"{run} of 0"] * 2
        assert together(own, lambda c: c.meet("call 1", "it", "same", 0.1)) == [Election(0, True)] * 2


def settled(own: Consensus, run: str) -> str:
    return own.settle("key", "it", lambda: f"{run} of {own.rank}")


def test_failure_of_the_leader_reaches_the_others_by_its_words() -> None:
    own = ranks(2)

    def settle(consensus: Consensus) -> str:
        def decide() -> str:
            if consensus.rank == 0:
                raise ValueError("does not fit")
            return ""

        with pytest.raises((ValueError, RanksDiffer)) as caught:
            consensus.settle("key", "the forward", decide)
        return str(caught.value)

    assert together(own, settle) == [
        "does not fit",
        "contract: rank 0 could not lower the forward: ValueError: does not fit",
    ]


def test_a_thousand_ranks_ask_a_constant_number_of_times_each() -> None:
    count, store = 1024, Counting()

    def rank(own: Consensus) -> None:
        own.elect("key", "it", "whole")
        own.settle("other key", "it", lambda: "decided")

    consensus = ranks(count, store, deadline_s=120.0)
    threads = [threading.Thread(target=rank, args=(own,)) for own in consensus]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asked = sorted(store.asked.values())
    assert asked[-2] <= 8  # all but the last to come, who reads what each has said
    assert sum(asked) <= 8 * count


def test_a_store_that_is_gone_says_so() -> None:
    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("connection lost")

        def wait(self, keys: list[str], timeout: timedelta) -> None:
            raise RuntimeError("connection lost")

    own = Consensus(RankStore(Gone(), "contract: rank 1"), "net", 1, (0, 1), 1.0)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"contract: rank 1: the store .* connection lost"):
        own.settle("key", "it", lambda: "")


def test_two_kinds_of_calls_are_not_alike() -> None:
    found = together(ranks(3), lambda c: c.elect("key", "it", "whole" if c.rank else "another"))
    assert found == [Election(0, False)] * 3


def test_rank_that_fails_as_the_leader_did_says_so_itself() -> None:
    def settle(consensus: Consensus) -> str:
        def decide() -> str:
            raise ValueError(f"does not fit on rank {consensus.rank}")

        with pytest.raises(ValueError, match="does not fit") as caught:
            consensus.settle("key", "the forward", decide)
        return str(caught.value)

    assert together(ranks(2), settle) == ["does not fit on rank 0", "does not fit on rank 1"]


def test_rank_that_says_for_ever_that_it_compiles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphshard.agree.consensus.DEADLINE_S", 0.3)
    _, second = ranks(2, deadline_s=0.1)
    second.is_busy = lambda rank: True
    with pytest.raises(RanksDiffer, match="for rank 0 to come"):
        second.settle("key", "it", lambda: "")


def test_few_other_ranks_are_asked_whether_they_compile() -> None:
    asked: set[int] = set()
    own = ranks(20, deadline_s=0.1)[1]
    own.is_busy = lambda rank: bool(asked.add(rank))  # type: ignore[func-returns-value]
    with pytest.raises(RanksDiffer):
        own.elect("key", "it", "whole")
    assert 1 not in asked
    assert 0 < len(asked) <= 8


def test_rank_alone_decides_and_stands_alone() -> None:
    own = Consensus(None)
    assert own.settle("key", "it", lambda: "decided") == "decided"
    assert [own.elect("key", "it", stands).leader for stands in ("whole", "")] == [0, None]
    assert own.meet("key", "it", "whole", 0.1) == Election(0, True)
    assert Consensus(None, rank=1, ranks=(2, 0, 1)).ranks == (0, 1, 2)


def test_words_of_all_ranks_are_heard_by_all() -> None:
    said = {0: ["b"], 1: [], 2: ["a", "b"]}
    assert together(ranks(3), lambda c: c.union("key", said[c.rank], 5.0)) == [frozenset("ab")] * 3
    assert Consensus(None).union("key", ["a"], 5.0) == frozenset("a")


def test_a_rank_that_comes_too_late_is_not_heard_by_any() -> None:
    first, late = ranks(2)
    left_out = LeftOut(first, meets=True)
    with mock.patch("graphshard.agree.consensus.PATIENCE_S", 0.05):
        assert left_out.agreed("key", ["a"]) is None
    assert late.union("passes\nkey", ["b"], 5.0) is None
    assert left_out.agreed("other", ["a"]) is None  # nobody is waited for again
    assert together(ranks(2), lambda c: LeftOut(c, meets=True).agreed("key", ["a"])) == [frozenset("a")] * 2
