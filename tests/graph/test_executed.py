"""What ranks have executed rolls into hashes that they compare, through a store; what differs is found and named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist
from store_double import CountingStore, on_ranks

from graphshard.agree import executed
from graphshard.agree.consensus import Consensus
from graphshard.agree.executed import Executed, check_compare_every
from graphshard.errors import RanksDiffer
from graphshard.reporting.report import Launched, ProgramRecord

GROUP = {"0": (0, 1)}
# Two copies of two shards.
SHARDS, COPIES = {0: "a", 1: "a", 2: "b", 3: "b"}, {0: "c", 1: "d", 2: "c", 3: "d"}
GROUPS = {"a": (0, 1), "b": (2, 3), "c": (0, 2), "d": (1, 3)}


@dataclass
class Named:
    fqn: str
    unit: Any = None


def sent(*fqns: str, kind: str = "all_gather", group: str = "0", behind_wait: bool = False, numel: int = 8) -> Launched:
    op = "" if kind == "all_gather" else "avg"
    return Launched(kind, group, 2, "float32", op, tuple((fqn, numel) for fqn in fqns), behind_wait)


def program(*launched: Launched, parameters: Sequence[str] = ()) -> ProgramRecord:
    named = tuple(("", fqn) for fqn in parameters)
    return ProgramRecord(0, "forward", "default", {}, 0.0, 0.0, launched=launched, parameters=named)


def ranks(
    count: int = 2, every: int = 1, groups: Callable[[int], Mapping[str, Sequence[int]]] = lambda rank: GROUP
) -> tuple[dict[int, Executed], CountingStore]:
    shared = CountingStore()
    everyone = range(count)
    return {
        rank: Executed("Net0", every, rank, groups(rank), everyone, shared.of(rank), Consensus(None))
        for rank in everyone
    }, shared


def told(found: dict[int, Executed], run: Callable[[int, Executed], None]) -> list[str]:
    """What each rank was told; ``""``: nothing."""
    raised = on_ranks(found, lambda rank: run(rank, found[rank]))
    assert all(error is None or isinstance(error, RanksDiffer) for error in raised.values()), raised
    return [str(raised[rank] or "") for rank in sorted(raised)]


def gathers(names: str) -> ProgramRecord:
    return program(*map(sent, names))


def test_equal_ranks_are_alike() -> None:
    def run(rank: int, own: Executed) -> None:
        record = gathers("abc")
        for _ in range(5):
            own.begin_call()
            own.ran(record, [])

    assert told(ranks(every=2)[0], run) == ["", ""]


def test_it_does_not_matter_in_which_programs_collectives_are() -> None:
    def run(rank: int, own: Executed) -> None:
        whole, cut = gathers("abc"), program(sent("b"), sent("c", behind_wait=True))
        for _ in range(3):
            own.begin_call()
            if rank:
                own.ran(gathers("a"), [])
                own.ran(cut, [], half=0)
                own.ran(cut, [], half=1)
            else:
                own.ran(whole, [])

    assert told(ranks()[0], run) == ["", ""]


def test_programs_that_equal_blocks_share_count_by_the_parameters_they_ran_for() -> None:
    def run(rank: int, own: Executed) -> None:
        shared = program(sent("layers.0.weight"), parameters=["layers.0.weight"])
        layers = [[Named(f"layers.{i}.weight")] for i in range(3)]
        for call in range(3):
            own.begin_call()
            own.ran(shared, layers[0])
            own.ran(shared, layers[2 if rank and call == 1 else 1])

    for rank, text in enumerate(told(ranks()[0], run)):
        names = ["layers.1.weight", "layers.2.weight"]
        assert text.startswith("agreement: Net0: call 2: ranks differ in the collectives executed over ranks 0, 1")
        assert f"first in place 1: got 'all_gather of float32 over 2 ranks: {names[rank]} (8 elements), 1 of 1'" in text


OTHERS: dict[str, tuple[Launched, ...]] = {
    "one more": (sent("a", "b"), sent("c")),
    "one less": (),
    "other buckets": (sent("a"), sent("b")),
    "another order": (sent("b", "a"),),
    "other sizes": (sent("a", "b", numel=9),),
    "another kind": (sent("a", "b", kind="reduce_scatter"),),
    "another dtype": (sent("a", "b")._replace(dtype="bfloat16"),),
    "another number of ranks": (sent("a", "b")._replace(ranks=3),),
    "another operator": (sent("a", "b")._replace(op="sum"),),
}


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("drifts_in", [0, 1, 4, 7])
def test_first_call_that_differs_is_named(what: str, drifts_in: int) -> None:
    def run(rank: int, own: Executed) -> None:
        usual, other = program(sent("a", "b")), program(*OTHERS[what])
        if drifts_in == 0:
            own.ran(other if rank else usual, [])
        for call in range(1, 9):
            own.begin_call()
            own.ran(other if rank and call == drifts_in else usual, [])
        own.begin_call()

    where = f"call {drifts_in}" if drifts_in else "before its first call"
    for text in told(ranks(every=8)[0], run):
        assert text.startswith(f"agreement: Net0: {where}: ranks differ in the collectives executed"), text
        assert "go back to a checkpoint" in text


def test_calls_within_a_window_are_told_apart() -> None:
    """What one call executes less, and the next one more, is a difference: calls begin on all ranks alike."""

    def run(rank: int, own: Executed) -> None:
        for names in ("a", "ab") if rank else ("ab", "a"):
            own.begin_call()
            own.ran(gathers(names), [])
        own.begin_call()

    texts = told(ranks(every=2)[0], run)
    assert all("call 1: " in text and "(8 elements), 1 of 1" in text for text in texts), texts
    assert "and 'the end' on rank 1" in texts[0]


def hybrid(rank: int) -> dict[str, tuple[int, ...]]:
    return {name: GROUPS[name] for name in (SHARDS[rank], COPIES[rank])}


@pytest.mark.parametrize("over_copies", [False, True])
def test_ranks_of_groups_without_a_difference_are_told_too(over_copies: bool) -> None:
    def run(rank: int, own: Executed) -> None:
        group = COPIES[rank] if over_copies else SHARDS[rank]
        own.begin_call()
        own.ran(program(sent("a", group=group), sent("drifted" if rank == 3 else "b", group=group)), [])
        own.begin_call()

    for rank, text in enumerate(told(ranks(4, groups=hybrid)[0], run)):
        mine = rank in GROUPS[COPIES[3] if over_copies else SHARDS[3]]
        assert ("what their process groups have found" in text) is not mine
        assert "Net0: call 1: ranks differ in the collectives" in text
        assert "drifted (8 elements)" in text


def test_groups_that_execute_other_things_are_not_compared_with_each_other() -> None:
    def run(rank: int, own: Executed) -> None:
        for _ in range(3):
            own.begin_call()
            own.ran(program(sent(SHARDS[rank], group=SHARDS[rank]), sent(COPIES[rank], group=COPIES[rank])), [])

    assert told(ranks(4, groups=hybrid)[0], run) == [""] * 4


def test_rank_that_does_not_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executed, "DEADLINE_S", 0.0)
    found, _ = ranks()
    for own in found.values():
        own._waits.deadline_s = 0.3

    def run(rank: int, own: Executed) -> None:
        for _ in range(2 - rank):
            own.begin_call()

    first, second = told(found, run)
    assert "waited 0.3 s for Net0: the collectives of calls 1 to 1 of rank 1, which never came so far" in first
    assert second == ""


def test_next_comparison_is_of_what_came_since() -> None:
    found, _ = ranks()
    for own in found.values():
        own.begin_call()
    found[0].ran(gathers("a"), [])
    assert all(told(found, lambda rank, own: own.begin_call()))
    assert told(found, lambda rank, own: own.begin_call()) == ["", ""]


def test_store_and_memory_do_not_fill_up() -> None:
    found, shared = ranks(4, groups=hybrid)
    sizes = []
    for _ in range(12):
        assert not any(told(found, lambda rank, own: own.begin_call()))
        sizes.append(len(shared.values))
    assert max(sizes) < 60, sizes  # some keys are only there where ranks came before the lead


def test_of_long_windows_the_last_calls_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executed, "KEPT_LINES", 3)
    monkeypatch.setattr(executed, "KEPT_CALLS", 4)

    def run(drifts_in: int, place: int) -> Callable[[int, Executed], None]:
        def on(rank: int, own: Executed) -> None:
            for call in range(1, 11):
                own.begin_call()
                for i in range(6):
                    own.ran(gathers("x" if rank and (call, i) == (drifts_in, place) else "a"), [])
            own.begin_call()

        return on

    assert all("call 9: " in text and ": x (8" in text for text in told(ranks(every=10)[0], run(9, 2)))
    assert all("call 9: " in text and "'3 more, hash " in text for text in told(ranks(every=10)[0], run(9, 4)))
    assert all("call 7, or earlier" in text for text in told(ranks(every=10)[0], run(2, 2)))


def test_torch_stores_forget_keys() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    found = {rank: Executed("Net0", 1, rank, GROUP, (0, 1), store, Consensus(None)) for rank in (0, 1)}
    for _ in range(6):
        assert not any(told(found, lambda rank, own: own.begin_call()))
    assert store.num_keys() < 20


def test_bad_numbers_of_calls_are_refused() -> None:
    for good in (None, 1, 100):
        check_compare_every(good)
    for wrong_type in (True, 1.0, "10"):
        with pytest.raises(TypeError, match=r"compile: compare_every: got .*, want a number of calls, or None"):
            check_compare_every(wrong_type)
    for wrong in (0, -3):
        with pytest.raises(ValueError, match=r"compile: compare_every: got .*, want at least 1 call"):
            check_compare_every(wrong)
