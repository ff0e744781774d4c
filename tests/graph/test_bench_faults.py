"""`bench.faults`: what is said of made-up outcomes, rows and tables, and one job that really runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.faults import __main__ as faults
from bench.faults.catalog import FAULTS, RANK, RANK_OR_UNIT, Fault
from bench.faults.crashes import CRASHES
from bench.faults.group import KINDS, FaultyGroup
from bench.faults.injections import Injection
from bench.faults.outcomes import JobOutcome, RankEnd, Result, Verdict, VerdictKind, fault_row, judge, same, sentences
from bench.faults.tables import fault_table, kind_lines
from bench.faults.unsharded import unsharded
from bench.faults.worker import odd_rank

PLAIN = Fault(Injection(), RANK_OR_UNIT, "fsdp2")
NAMES_ODD = "RuntimeError: rank 0 waited 20 s for rank 1, which never came"


def result(*values: float) -> Result:
    return [torch.tensor(values)], {"head.weight": torch.tensor(values)}


def end(rank: int, status: int | None, stderr: str = "", got: Result | None = None, end_s: float = 110.0) -> RankEnd:
    return RankEnd(rank, status, end_s, stderr, result(1.0) if status == 0 and got is None else got)


def outcome(*ends: RankEnd, injected_s: float | None = 100.0, odd: int = 1) -> JobOutcome:
    return JobOutcome(odd, injected_s, ends)


def kind(fault: Fault, *ends: RankEnd, reference: list[Result] | None = None) -> VerdictKind:
    return judge(fault, outcome(*ends), reference).kind


# -- what is said of a job


def test_run_is_right_if_its_results_are_those_of_the_reference() -> None:
    ends = (end(0, 0), end(1, 0))
    assert kind(PLAIN, *ends, reference=[result(1.0), result(1.0)]) == "right"
    assert kind(PLAIN, *ends, reference=[result(1.0), result(1.0 + 1e-6)]) == "wrong"
    assert kind(replace(PLAIN, tolerance=1e-5), *ends, reference=[result(1.0), result(1.0 + 1e-6)]) == "right"
    assert kind(replace(PLAIN, tolerance=1e-5), *ends, reference=[result(1.0), result(1.1)]) == "wrong"
    assert kind(PLAIN, *ends) == "wrong"


def test_other_numbers_of_ranks_losses_or_parameters_are_not_the_same() -> None:
    one: Result = result(1.0)
    for other in ([], [one, one], [([], one[1])], [(one[0], {})], [(one[0], {"other": one[0][0]})], [result(1.0, 1.0)]):
        assert not same([one], other, 0.0)
        assert not same([one], other, 1e-5)
    assert same([one], [one], 0.0)


def test_fault_is_detected_if_every_rank_fails_and_another_one_names_the_rank() -> None:
    own = "RuntimeError: rank 1 waited 20 s for rank 0, which never came"
    assert kind(PLAIN, end(0, 1, NAMES_ODD), end(1, 1)) == "detected"
    assert kind(PLAIN, end(0, 1, "RuntimeError: connection closed"), end(1, 1)) == "untold"
    assert kind(PLAIN, end(0, 1), end(1, 1, own)) == "untold"  # it names itself, and blames another
    assert kind(PLAIN, end(0, 1, "RuntimeError: rank 11 is gone"), end(1, 1)) == "untold"
    assert kind(PLAIN, end(0, 1), end(1, -6, "VerifyError: unit 'blocks.1' is gathered twice")) == "detected"
    assert kind(replace(PLAIN, says=RANK), end(0, 1), end(1, 1, "VerifyError: unit 'blocks.1'")) == "untold"


def test_some_ranks_that_end_well_beside_others_that_fail_are_apart() -> None:
    assert kind(PLAIN, end(0, 1, NAMES_ODD), end(1, 0)) == "apart"


def test_rank_that_runs_on_is_a_hang_whatever_the_others_say() -> None:
    assert kind(PLAIN, end(0, 1, NAMES_ODD), end(1, None)) == "hang"
    assert kind(replace(PLAIN, kills=True), end(0, None), end(1, -9)) == "hang"
    assert kind(replace(PLAIN, kills=True), end(0, 1, NAMES_ODD), end(1, None)) == "detected"  # stopped: not live
    assert kind(replace(PLAIN, kills=True), end(0, 0), end(1, None)) == "wrong"


def test_error_that_was_injected_is_not_the_detection() -> None:
    fault = replace(PLAIN, raises=True)
    assert kind(fault, end(0, 1), end(1, 1, "OutOfMemoryError: in blocks.1")) == "untold"
    assert kind(fault, end(0, 1, NAMES_ODD), end(1, 1)) == "detected"
    assert kind(fault, end(0, 1, NAMES_ODD), end(1, None)) == "hang"


def test_job_in_which_nothing_went_wrong_does_not_count() -> None:
    for status in (0, 1, None):
        verdict = judge(PLAIN, outcome(end(0, status), end(1, status), injected_s=None), [result(1.0)] * 2)
        assert (verdict.kind, verdict.seconds) == ("elsewhere", None)


def test_seconds_are_those_of_the_last_live_rank() -> None:
    ends = (end(0, 1, NAMES_ODD, end_s=103.0), end(1, 1, end_s=107.5))
    assert judge(PLAIN, outcome(*ends), None).seconds == 7.5
    assert judge(replace(PLAIN, kills=True), outcome(*ends), None).seconds == 3.0


def test_what_an_error_names_is_counted() -> None:
    said = "[rank0]: RuntimeError: rank 1 does not gather 'experts.1'"
    verdict = judge(PLAIN, outcome(end(0, 1, said), end(1, 1)), None)
    assert (verdict.names_rank, verdict.names_unit) == (True, True)
    assert verdict.said[0] == "RuntimeError: rank 1 does not gather 'experts.1'"
    verdict = judge(PLAIN, outcome(end(0, 1, NAMES_ODD), end(1, 1)), None)
    assert (verdict.names_rank, verdict.names_unit) == (True, False)


def test_frames_and_warnings_are_no_sentences() -> None:
    stderr = """[rank1]: Traceback (most recent call last):
[rank1]:   File "x.py", line 1, in blocks
[rank1]:     blocks.1(rank 1)
x.py:3: FutureWarning: rank 1 is deprecated
[rank1]: ValueError: first line
second line
"""
    assert sentences(stderr) == ["ValueError: first line", "second line"]


def test_rank_that_hung_says_where_it_stood() -> None:
    frames = '  File "store.py", line 3 in wait\n  File "a.py", line 9 in f\n'
    stderr = f"said\nCurrent thread 0x1 (most recent call first):\n{frames}"
    verdict = judge(PLAIN, outcome(end(0, None, stderr), end(1, 1)), None)
    assert verdict.kind == "hang"
    assert verdict.said[0].splitlines()[-2:] == ['File "store.py", line 3 in wait', 'File "a.py", line 9 in f']


# -- rows and tables


def test_row_counts_kinds_and_times_of_what_was_detected() -> None:
    verdicts = [
        Verdict("detected", 2.0, True, False), Verdict("detected", 8.0, True, True), Verdict("detected", 3.0),
        Verdict("right", 99.0), Verdict("hang", None), Verdict("elsewhere", None), Verdict("apart", 4.0),
    ]  # fmt: skip
    row = fault_row("skipped step", 4, verdicts)
    assert {kind: count for kind, count in row.counts.items() if count} == {
        "detected": 3, "right": 1, "hang": 1, "elsewhere": 1, "apart": 1,
    }  # fmt: skip
    assert (row.times, row.median_s, row.max_s, row.rank_named, row.unit_named) == (7, 3.0, 8.0, 2, 1)
    header, line = fault_table([row])
    assert header.split()[-1] == "bad"
    assert line.split("  ")[0] == "skipped step"
    assert line.endswith("apart 1, elsewhere 1")
    assert line.split()[2:11] == ["4", "6", "1", "3", "3.0", "8.0", "2", "1", "1"]
    assert kind_lines([row])[-1] == "4 of 7 jobs right or detected, 1 hangs"
    assert [text.split(":")[0] for text in kind_lines([row])[:-1]] == ["apart", "elsewhere"]


@pytest.mark.parametrize(
    ("kind", "status"),
    [("right", 0), ("detected", 0), ("untold", 1), ("apart", 1), ("wrong", 1), ("hang", 1), ("elsewhere", 1)],
)
def test_exit_status_tells_whether_all_is_well(kind: VerdictKind, status: int) -> None:
    assert faults.exit_status([fault_row("x", 2, [Verdict("right", 1.0), Verdict(kind, 1.0)])]) == status


def test_options_are_checked_and_quick_fills_in(capsys: pytest.CaptureFixture[str]) -> None:
    quick = faults.parse(["--quick", "--times", "2"])
    assert (tuple(quick.faults), tuple(quick.ranks), quick.times) == (faults.QUICK, (2,), 2)
    full = faults.parse([])
    assert (tuple(full.faults), tuple(full.ranks)) == ((*FAULTS, *CRASHES), (2, 4))
    for bad in (["--faults", "nothing"], ["--ranks", "1"], ["--times", "0"], ["--deadline", "0"], ["--json", "no/f"]):
        with pytest.raises(SystemExit):
            faults.parse(bad)
        assert "error: " in capsys.readouterr().err


def test_rank_on_which_it_goes_wrong_is_there_and_not_the_first() -> None:
    assert [odd_rank(ranks) for ranks in (2, 3, 4)] == [1, 1, 2]


# -- what is injected


class Inner:
    """Records what is launched."""

    def __init__(self) -> None:
        self.launched: list[str] = []

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def broadcast(self, what: str) -> Any:
        self.launched.append(what)
        return self

    def wait(self) -> None:
        self.launched.append("wait")


def launched(kind: str) -> tuple[list[str], int]:
    """What goes out for three collectives, waited for in order, and how often it went wrong."""
    inner, told = Inner(), []
    group = FaultyGroup(inner)  # type: ignore[arg-type]
    group.disturb(kind, 0.0, lambda: told.append(kind))
    works = [group.launch("broadcast", (name,)) for name in "abc"]
    for work in works:
        work.wait()
    return inner.launched, len(told)


@pytest.mark.parametrize(
    ("kind", "order"),
    [("dropped", "b c"), ("delayed", "a b c"), ("duplicated", "a wait a b c"), ("reordered", "b a c")],
)
def test_collectives_go_wrong_once_and_as_they_say(kind: str, order: str) -> None:
    out, times = launched(kind)
    while out[-1] == "wait":
        out.pop()
    assert out == order.split()
    assert times == 1


def test_collective_that_is_awaited_at_once_cannot_be_put_behind_the_next() -> None:
    inner, told = Inner(), []
    group = FaultyGroup(inner)  # type: ignore[arg-type]
    group.disturb("reordered", 0.0, lambda: told.append(1))
    group.launch("broadcast", ("a",)).wait()
    assert told == []
    works = [group.launch("broadcast", (name,)) for name in "bc"]  # but these can
    assert (inner.launched, told) == (["a", "wait", "c", "b"], [1])
    assert works[1] is inner


def test_unknown_kind_of_collective_is_refused() -> None:
    with pytest.raises(ValueError, match=f"got 'lost', want one of {', '.join(KINDS)}"):
        FaultyGroup(Inner()).disturb("lost", 0.0, lambda: None)  # type: ignore[arg-type]


def test_unsharded_model_has_the_mean_of_all_ranks_gradients() -> None:
    alike = unsharded("another torch version", 2)  # changes no number
    dead = unsharded("dead expert", 2)
    assert torch.equal(alike[0][0][0], dead[0][0][0])  # rank 0, first step
    assert not torch.equal(alike[1][0][0], dead[1][0][0])
    assert not torch.equal(alike[0][0][1], dead[0][0][1])  # its second step knows of the other's gradients
    parts: list[Tensor] = [parts["experts.1.outer.bias"] for _, parts in dead]
    assert [part.shape for part in parts] == [(8,), (8,)]


def test_version_of_torch_on_one_rank_is_detected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "faults.json"
    name = "another torch version"
    status = faults.main(["--faults", name, "--ranks", "2", "--times", "1", "--json", str(file)])
    out = capsys.readouterr().out
    (job,) = json.loads(file.read_text())["jobs"]
    assert (status, job["kind"], job["names_rank"]) == (0, "detected", True), out
    assert "1 of 1 jobs right or detected, 0 hangs" in out
