"""Ranks ask each other through a store; deadlines of launches and waits."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import HashStore

from graphshard.faults import check_deadline, inquiry
from graphshard.faults.deadlines import default_deadline_s, is_compiling
from graphshard.faults.status import Status
from graphshard.faults.watchdog import Watchdog

STATUS = Status(1, "a", 1, 3, "outside", where="train.py:31")


def test_answers_come_by_rank_and_none_from_a_rank_that_is_silent() -> None:
    store = HashStore()
    assert inquiry.latest_question(store) == 0
    question = inquiry.ask(store, 0, "fault", final=True)
    assert inquiry.read_question(store, 1) == question
    assert inquiry.read_question(store, 2) is None
    inquiry.answer(store, question, STATUS)
    start = time.monotonic()
    assert inquiry.answers(store, question, [1, 2], 0.3) == {1: STATUS, 2: None}
    assert 0.3 <= time.monotonic() - start < 5
    inquiry.answer(store, question, replace(STATUS, rank=2))
    start = time.monotonic()
    assert inquiry.answers(store, question, [1, 2], 30.0)[2] == replace(STATUS, rank=2)
    assert time.monotonic() - start < 5


def test_questions_do_not_take_each_others_answers() -> None:
    store = HashStore()
    first, second = (inquiry.ask(store, rank, f"fault{rank}", final=False) for rank in (0, 2))
    inquiry.answer(store, second, STATUS)
    assert inquiry.answers(store, first, [1], 0.0) == {1: None}
    assert inquiry.answers(store, second, [1], 0.0) == {1: STATUS}


def test_one_rank_raises_the_alarm() -> None:
    store = HashStore()
    assert [inquiry.raise_alarm(store, rank, "") for rank in (3, 1, 3)] == [True, False, False]


def test_alarm_of_ranks_that_were_ended_does_not_silence_those_started_again() -> None:
    store = HashStore()
    assert inquiry.raise_alarm(store, 1, inquiry.latest_alarm(store))
    before = inquiry.latest_alarm(store)  # ranks of the next attempt find it
    assert [inquiry.raise_alarm(store, rank, before) for rank in (2, 0)] == [True, False]


def test_what_ranks_that_were_ended_have_left_is_not_of_this_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("graphshard.faults.watchdog.weakref.ref", lambda group: None)
    store = HashStore()
    inquiry.say_compiling(store, 1, "the backward of region 0")
    inquiry.say_alive(store, 1, "4")
    inquiry.say_raised(store, 1, "no memory left")
    past = inquiry.ask(store, 0, "fault", final=True)
    watchdog = Watchdog(store, {})
    watchdog.start()
    watchdog.stop()
    assert inquiry.read_compiling(store, [1]) == {}
    assert inquiry.read_raised(store, [1]) == {}
    assert watchdog._seen == past.number


def test_who_answered_waits_until_the_question_is_closed() -> None:
    store = HashStore()
    question = inquiry.ask(store, 0, "fault", final=True)
    start = time.monotonic()
    inquiry.wait_closed(store, question, 0.3)
    assert time.monotonic() - start >= 0.3
    inquiry.close(store, question)
    inquiry.wait_closed(store, question, 30.0)
    assert time.monotonic() - start < 5


def test_store_that_does_not_answer_is_left_alone() -> None:
    held = threading.Event()
    start = time.monotonic()
    assert inquiry.within(0.2, lambda: held.wait(30)) is None
    assert time.monotonic() - start < 5
    held.set()

    def dead() -> None:
        raise RuntimeError("Connection reset by peer")

    assert inquiry.within(5.0, dead) is None
    assert inquiry.within(5.0, lambda: 7) == 7


def test_rank_is_believed_to_compile_while_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    inquiry.say_compiling(store, 1, "the backward of region 0")
    inquiry.say_alive(store, 1, "4")
    inquiry.say_compiling(store, 2, "")
    assert inquiry.read_compiling(store, [1, 2, 3]) == {1: b" the backward of region 0 4"}
    monkeypatch.setattr("graphshard.faults.deadlines.default_store", lambda: store)
    assert [is_compiling(rank) for rank in (1, 2, 3)] == [True, False, False]
    inquiry.say_compiling(store, 1, f"{inquiry.WAITS}, the backward of region 0")
    assert not is_compiling(1)  # else two that wait for each other would wait for ever
    inquiry.say_compiling(store, 1, "the backward of region 0")

    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
    monkeypatch.setattr("graphshard.faults.watchdog.weakref.ref", lambda group: None)
    now = 100.0
    monkeypatch.setattr("graphshard.faults.watchdog.time.monotonic", lambda: now)
    watchdog = Watchdog(None, {})
    monkeypatch.setattr("graphshard.faults.deadlines.running", lambda: watchdog)
    assert is_compiling(1)
    now += 60.0
    assert not is_compiling(1)  # it was ended, or is stopped
    inquiry.say_alive(store, 1, "5")
    assert is_compiling(1)
    assert watchdog.alive({1: b"4"})
    now += inquiry.POLL_S
    assert watchdog.alive({1: b"4"})
    now += inquiry.POLL_S
    assert not watchdog.alive({1: b"4"})
    assert watchdog.alive({1: b"4", 2: b"1"})
    assert watchdog.alive({1: b"5"})


@pytest.mark.parametrize(("timeout_s", "deadline_s"), [(600.0, 570.0), (1800.0, 1770.0), (100.0, 70.0), (40.0, 36.0)])
def test_default_deadline_is_below_the_time_out(timeout_s: float, deadline_s: float) -> None:
    assert default_deadline_s(timeout_s) == pytest.approx(deadline_s)


def test_bad_deadlines_are_refused() -> None:
    for good in (None, 1, 0.5, float("inf")):
        check_deadline(good)
    for wrong_type in (True, "60", [60]):
        with pytest.raises(TypeError, match=r"compile: deadline_s: got .*, want seconds as a number, or None"):
            check_deadline(wrong_type)
    for wrong in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"compile: deadline_s: got .*, want more than 0 seconds"):
            check_deadline(wrong)


def test_what_an_error_said_is_there_for_those_that_ask_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHSHARD_FAULTS", str(tmp_path))
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("graphshard.faults.watchdog.weakref.ref", lambda group: None)
    store, told = HashStore(), ""
    for rank in (1, 0):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        told = Watchdog(store, {}).waited(f"rank {rank} waited in vain", [1 - rank])
    silent = "rank 1 does not answer: it is dead or stopped, its last error: rank 1 waited in vain"
    assert told.startswith(f"rank 0 waited in vain; {silent}")
    assert told.startswith(inquiry.read_raised(store, [0, 1, 2])[0])
    inquiry.say_raised(store, 1, "")  # it is started again
    assert list(inquiry.read_raised(store, [0, 1, 2])) == [0]
