"""Plans of earlier processes: found by all that they follow from, and never in the way."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from problems import stack

from graphshard.compat import cache
from graphshard.planner import best_schedule, choose_residency
from graphshard.planning import plan_cache
from graphshard.planning.plan_cache import remembered_residency, remembered_schedule

PROBLEM = stack(3)
BUDGET = 10**6


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "one"))


def entries(tmp_path: Path) -> list[Path]:
    return [path for path in tmp_path.glob("*/graphshard/*/*") if path.is_file()]


def is_planned_again() -> bool:
    with mock.patch.object(plan_cache, "best_schedule", side_effect=best_schedule) as made:
        assert remembered_schedule(PROBLEM, BUDGET) == best_schedule(PROBLEM, BUDGET)
    return made.called


def test_schedule_is_found_by_problem_and_budget() -> None:
    assert is_planned_again()
    assert not is_planned_again()
    with mock.patch.object(plan_cache, "best_schedule", side_effect=AssertionError("planned")):
        for problem, budget in ((stack(4), BUDGET), (PROBLEM, BUDGET - 1)):
            with pytest.raises(AssertionError, match="planned"):
                remembered_schedule(problem, budget)


def test_residency_is_found_by_both_problems() -> None:
    forward, backward = stack(3), stack(3, backward=True)
    kept = remembered_residency(forward, backward, BUDGET)
    assert kept == choose_residency(forward, backward, BUDGET) != frozenset()
    with mock.patch.object(plan_cache, "choose_residency", side_effect=AssertionError("planned")):
        assert remembered_residency(forward, backward, BUDGET) == kept
        with pytest.raises(AssertionError, match="planned"):
            remembered_residency(stack(4), stack(4, backward=True), BUDGET)


def with_json(change: Callable[[dict[str, object]], object]) -> Callable[[bytes], bytes]:
    def changed(content: bytes) -> bytes:
        entry = json.loads(content)
        change(entry)
        return json.dumps(entry).encode()

    return changed


@pytest.mark.parametrize(
    "damaged",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"\x80\x04",
        lambda content: b"[]",
        with_json(lambda entry: entry.pop("steps")),
        with_json(lambda entry: entry.update(steps=entry["steps"][::-1])),  # of no order
        with_json(lambda entry: entry.update(buckets=entry["buckets"][:-1])),  # of another problem
        with_json(lambda entry: entry.update(buckets=[["gather", [99]]])),
    ],
)
def test_damaged_and_foreign_entries_are_made_again_with_a_line(
    damaged: Callable[[bytes], bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    is_planned_again()
    (path,) = entries(tmp_path)
    path.write_bytes(damaged(path.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert is_planned_again()
    (line,) = caplog.messages
    assert "plan cache" in line
    assert path.name[:16] in line
    assert not is_planned_again()


def test_entry_that_breaks_the_budget_is_made_again(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    choice = remembered_schedule(PROBLEM, BUDGET)
    (path,) = entries(tmp_path)
    roomy = path.read_bytes()
    least = choice.simulation.peak_bytes - 1
    tight = remembered_schedule(PROBLEM, least)
    next(other for other in entries(tmp_path) if other != path).write_bytes(roomy)
    assert remembered_schedule(PROBLEM, least) == tight
    assert f"want at most {least}" in caplog.text


def test_process_that_dies_while_it_writes_leaves_no_entry(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, signal\n"
        "from graphshard.compat import cache\n"
        "pathlib.Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "cache.write_entry('ab12', b'x' * 100000)\n"
    )
    died = subprocess.run([sys.executable, "-c", code], check=False, timeout=120)
    assert died.returncode == -signal.SIGKILL
    assert entries(tmp_path)  # what it was writing
    assert cache.read_entry("ab12") is None
    cache.write_entry("ab12", b"whole")
    assert cache.read_entry("ab12") == b"whole"


def test_artifacts_carry_plans_to_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_planned_again()
    saved = torch.compiler.save_cache_artifacts()
    assert saved is not None
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "other"))
    assert is_planned_again()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "third"))
    torch.compiler.load_cache_artifacts(saved[0])
    assert not is_planned_again()


@pytest.mark.parametrize("blocked", ["one", "one/graphshard"])
def test_folder_that_cannot_be_written_costs_a_line(
    blocked: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / blocked).parent.mkdir(exist_ok=True)
    (tmp_path / blocked).write_text("a file")
    assert is_planned_again()
    assert "cannot be written" in caplog.text


def test_caches_that_are_off_keep_nothing(tmp_path: Path) -> None:
    with torch.compiler.config.patch(force_disable_caches=True):
        assert is_planned_again()
        assert is_planned_again()
    assert not entries(tmp_path)
