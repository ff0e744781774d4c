"""What environment variables say is checked when a model is compiled, and what the demo is given when it starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from graphshard import env
from graphshard.demo.__main__ import parse
from graphshard.lowering.driver import check_environment
from graphshard.reporting.report import Report
from graphshard.surroundings import note_surroundings


def test_a_misspelt_variable_is_noted_with_what_it_may_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHSHARD_VERFIY", "2")
    monkeypatch.setenv("GRAPHSHARD_VERIFY", "1")
    report = Report()
    note_surroundings(nn.Linear(1, 1), False, "", report)
    (line,) = report.notes
    assert line == "GRAPHSHARD_VERFIY is ignored: graphshard has no variable of this name, but GRAPHSHARD_VERIFY"


@pytest.mark.parametrize(
    ("device", "said"),
    [("NVIDIA L40S", True), ("NVIDIA RTX A1000", True), ("NVIDIA H200", False), ("NVIDIA GH200 480GB", False)],
)
def test_a_gpu_without_a_row_is_noted(device: str, said: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device)
    for planned_for, is_noted in (("cuda", said), ("cpu", False), ("", False)):
        report = Report()
        note_surroundings(nn.Linear(1, 1), False, planned_for, report)
        assert [f"no row for {device}: " in line for line in report.notes] == [True] * is_noted


def test_a_name_like_no_other_is_noted_with_all_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHSHARD_HOME_DIRECTORY_OF_MINE", "/opt")
    (known,) = env.unknown().values()
    assert known.startswith("GRAPHSHARD_VERIFY, ")


def test_dumps_that_can_have_no_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GRAPHSHARD_DUMP", str(tmp_path / "file" / "below"))
    with pytest.raises(ValueError, match=r"^GRAPHSHARD_DUMP: got .*below, want a directory that can be made: "):
        check_environment()


def test_a_file_in_the_place_of_the_folder_of_checkpoints_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("sys.argv", ["demo", "--checkpoint", str(tmp_path / "file")])
    with pytest.raises(SystemExit):
        parse()
    assert "--checkpoint: got" in (said := capsys.readouterr().err) and "which is a file, want a folder" in said
