"""What environment variables say is checked when a model is compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from graphshard import env
from graphshard.lowering.driver import check_environment
from graphshard.reporting.report import Report
from graphshard.surroundings import note_surroundings


def test_a_misspelt_variable_is_noted_with_what_it_may_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHSHARD_VERFIY", "2")
    monkeypatch.setenv("GRAPHSHARD_VERIFY", "1")
    report = Report()
    note_surroundings(nn.Linear(1, 1), False, report)
    (line,) = report.notes
    assert line == "GRAPHSHARD_VERFIY is ignored: graphshard has no variable of this name, but GRAPHSHARD_VERIFY"


def test_a_name_like_no_other_is_noted_with_all_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHSHARD_HOME_DIRECTORY_OF_MINE", "/opt")
    (known,) = env.unknown().values()
    assert known.startswith("GRAPHSHARD_VERIFY, ")


def test_dumps_that_can_have_no_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GRAPHSHARD_DUMP", str(tmp_path / "file" / "below"))
    with pytest.raises(ValueError, match=r"^GRAPHSHARD_DUMP: got .*below, want a directory that can be made: "):
        check_environment()
