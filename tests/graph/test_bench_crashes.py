"""`bench.faults`: what is said of jobs that crashed, made up here, and where a crash goes off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.faults.crash_points import POINTS, Crasher
from bench.faults.crash_runner import CrashOutcome, CrashRow, LossLine, judge_crash, largest_difference, read_losses
from bench.faults.crash_worker import CrashSpec, crasher_of
from bench.faults.crashes import CRASHES, STEPS, Crash
from bench.faults.tables import crash_table

CRASH = Crash("backward", (10,), (4,))
UNFINISHED = "checkpoint step-00000006.unfinished-0a is passed over: it was never finished, or is being removed"


def lines(launch: int, attempt: int, first: int, until: int, scale: float = 1.0) -> list[LossLine]:
    return [LossLine(launch, attempt, first, step, scale / step, 1.0) for step in range(first + 1, until + 1)]


def outcome(*parts: list[LossLine], statuses: tuple[int | None, ...] = (0,), final: str = "same") -> CrashOutcome:
    return CrashOutcome(
        statuses, (100.0,), 130.0, tuple(line for part in parts for line in part), final, (), UNFINISHED
    )


HEALTHY = outcome(lines(0, 0, 0, STEPS))
RIGHT = outcome(lines(0, 0, 0, 4), lines(0, 1, 4, STEPS))


def kind(job: CrashOutcome, crash: Crash = CRASH) -> str:
    return judge_crash(crash, job, HEALTHY).kind


def test_job_is_right_if_it_goes_on_from_the_last_complete_checkpoint_with_the_same_bits() -> None:
    assert judge_crash(CRASH, RIGHT, HEALTHY).seconds == 30.0
    assert kind(RIGHT) == "right"
    assert kind(outcome(lines(0, 0, 0, 4), lines(0, 1, 2, STEPS))) == "wrong"
    assert kind(outcome(lines(0, 0, 0, 4), lines(0, 1, 4, STEPS - 1))) == "wrong"
    assert kind(outcome(lines(0, 0, 0, 4), lines(0, 1, 4, STEPS, 1 + 1e-15))) == "wrong"
    assert kind(outcome(lines(0, 0, 0, 4, 1 + 1e-15), lines(0, 1, 4, STEPS))) == "wrong"
    assert kind(replace(RIGHT, final="other")) == "wrong"
    assert kind(replace(RIGHT, final="")) == "wrong"
    assert kind(replace(RIGHT, left=("step-00000006.unfinished-0a",))) == "wrong"
    assert kind(outcome(lines(0, 1, 0, STEPS)), replace(CRASH, goes_on_from=(0,))) == "right"  # ended before a step


def test_job_that_hangs_fails_or_never_crashed_is_told_apart() -> None:
    assert kind(replace(RIGHT, statuses=(None,))) == "hang"
    assert kind(replace(RIGHT, statuses=(1,))) == "untold"
    assert kind(replace(RIGHT, crashed=())) == "elsewhere"
    assert kind(RIGHT, replace(CRASH, numbers=(10, 3))) == "elsewhere"


def test_other_numbers_of_ranks_may_differ_by_rounding_and_by_no_more() -> None:
    crash = replace(CRASH, ends_launcher=True, other_ranks=2.0)
    for scale, expected in ((1.0, "right"), (1 + 1e-6, "right"), (1 + 1e-4, "wrong")):
        job = outcome(lines(0, 0, 0, 4), lines(1, 0, 4, STEPS, scale), statuses=(-9, 0), final="other")
        assert kind(job, crash) == expected
    assert kind(outcome(lines(0, 0, 0, 4, 1 + 1e-6), lines(1, 0, 4, STEPS), statuses=(-9, 0)), crash) == "wrong"
    assert largest_difference([LossLine(0, 0, 0, STEPS + 1, 1.0, 1.0)], HEALTHY.lines) == float("inf")


def test_line_that_a_crash_has_cut_off_is_none(tmp_path: Path) -> None:
    file = tmp_path / "losses"
    assert read_losses(file, 0) == []
    file.write_text('{"attempt": 1, "step": 5, "loss": 0.5, "grad_norm": 2.0, "first": 4}\n{"attempt": 1, "st')
    assert read_losses(file, 2) == [LossLine(2, 1, 4, 5, 0.5, 2.0)]


def test_crash_goes_off_once_where_and_when_it_says() -> None:
    ended: list[int] = []
    crasher = Crasher("forward", 2, lambda: ended.append(1))
    for where in ("forward", "backward", "forward", "forward"):
        crasher.at(where)
    assert ended == [1]
    with pytest.raises(ValueError, match="crash: got 'lunch', want one of forward, "):
        Crasher("lunch", 1, lambda: None)


def test_ranks_that_end_do_so_in_the_attempts_that_are_named(tmp_path: Path) -> None:
    def ends(crash: Crash | None, rank: int, attempt: int = 0, launch: int = 0) -> bool:
        return crasher_of(CrashSpec(crash, "aot_eager", 0.0, launch), tmp_path, rank, 4, attempt) is not None

    assert [ends(CRASH, rank) for rank in range(4)] == [False, False, True, False]
    assert [ends(replace(CRASH, ranks="first"), rank) for rank in range(2)] == [True, False]
    assert all(ends(replace(CRASH, ranks="all"), rank) for rank in range(4))
    assert not ends(None, 2)
    assert not ends(CRASH, 2, attempt=1)
    assert not ends(CRASH, 2, launch=1)
    assert ends(replace(CRASH, numbers=(10, 3)), 2, attempt=1)
    for crash in CRASHES.values():
        assert crash.point in POINTS
        assert len(crash.goes_on_from) == len(crash.numbers)
    spec = CrashSpec(CRASH, "inductor", 0.1, 1)
    spec.write(tmp_path)
    assert replace(CrashSpec.read(tmp_path), crash=None) == replace(spec, crash=None)


def test_table_says_from_where_jobs_went_on() -> None:
    row = CrashRow("crash of all ranks", 2, "right", 30.4, (4, 6), 0.0, 1)
    header, one, other = crash_table([row, replace(row, seconds=None, began=(), difference=1.2e-6)])
    assert header.split()[0] == "crash"
    assert one.split()[4:] == ["2", "right", "30", "4,", "6", "bitwise", "1"]
    assert other.split()[4:] == ["2", "right", "-", "-", "1e-06", "1"]
    assert crash_table([]) == []
