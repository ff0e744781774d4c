"""``graphshard plan``: what it prints, writes and refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import scale_models

from graphshard.scale import command, models
from graphshard.scale.__main__ import main
from graphshard.scale.estimate import Workload
from graphshard.scale.models import ModelChoice

MEAN = ["plan", "--model", "scale_models:mean", "--batch", "4", "--seq", "32", "--plan", "fsdp2"]


def test_command_prints_and_writes_one_line_for_each_world(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "numbers.json"
    assert main([*MEAN, "--world", "8..64", "--json", str(file)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "MFU: 3 x FLOPs" in printed[1]
    assert [line.split()[0] for line in printed[-4:]] == ["8", "16", "32", "64"]
    numbers = json.loads(file.read_text())
    assert [one["world_size"] for one in numbers] == [8, 16, 32, 64]
    for one in numbers:
        assert one["lower_bound_us"] <= one["step_us"]
        assert one["peak_bytes"] == sum(one["memory_bytes"].values())


def test_command_traces_once_for_all_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    count = []
    real = models.trace_step
    monkeypatch.setattr(models, "trace_step", lambda *args, **kwargs: count.append(1) or real(*args, **kwargs))
    assert main([*MEAN, "--world", "1,8,4096"]) == 0
    assert len(count) == 1


def test_command_lays_out_copies_and_shards(tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    assert main([*MEAN, "--world", "16,64", "--hsdp", "x8", "--json", str(file)]) == 0
    assert [(one["copies"], one["shards"]) for one in json.loads(file.read_text())] == [(2, 8), (8, 8)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "llama9", "--world", "8"], "model: got 'llama9', want one of llama3-8b, llama3-70b"),
        (["--model", "no_such:thing", "--world", "8"], "want a module that can be imported"),
        (["--model", "scale_models:nothing", "--world", "8"], "want a module that can be imported"),
        (["--model", "scale_models:NOT_A_FUNCTION", "--world", "8"], r"want a function of \(batch, seq\)"),
        (["--model", "scale_models:only_a_module", "--world", "8"], r"want \(module, inputs of its forward\)"),
        (["--model", "scale_models:mean", "--world", "8", "--hardware", "h900"], "want one of a100, b200"),
        (["--model", "scale_models:mean", "--world", "8..x"], "world: got '8..x', want"),
        (["--model", "scale_models:mean", "--world", "0"], "world: got '0', want"),
        (["--model", "scale_models:mean", "--world", "12", "--hsdp", "2x8"], r"A copies x B shards = 12"),
        (["--model", "scale_models:mean", "--world", "12", "--hsdp", "two"], r"A copies x B shards = 12"),
        (["--model", "llama3-8b", "--world", "12", "--tp", "8"], "tp: got 8 for 12 GPUs, want a factor"),
        (["--model", "scale_models:mean", "--world", "8", "--tp", "2"], "only presets have a plan"),
        (["--model", "llama3-8b", "--world", "8", "--tp", "8", "--seq", "100"], "8 ranks for 100 tokens"),
        (["--model", "scale_models:mean", "--world", "8", "--batch", "0"], "batch: got 0, want at least 1"),
        (["--model", "scale_models:mean", "--world", "8", "--accumulation", "0"], "accumulation: got 0"),
        (["--model", "scale_models:mean", "--world", "8", "--memory-budget", "lots"], "such as 60GiB"),
        (["--model", "scale_models:mean", "--world", "8", "--memory-budget", "1KiB"], "optimizer and accumulated"),
    ],
)
def test_command_says_what_is_wrong(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("graphshard plan: ")
    assert re.search(message, error), error


def test_command_traces_every_block_where_blocks_differ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, asked = tmp_path / "numbers.json", []

    def make(choice: ModelChoice, all_blocks: bool = False) -> Workload:
        asked.append(all_blocks)
        return scale_models.workload(scale_models.traced_mean(9 if all_blocks else 4, scale_models.Masking), 9)

    monkeypatch.setattr(command, "make_workload", make)
    assert main(["plan", "--model", "m", "--world", "8", "--plan", "fsdp2", "--json", str(file)]) == 0
    assert asked == [False, True]
    (found,) = json.loads(file.read_text())
    assert found["memory_bytes"]["parameters"] == 10 * (64 * 64 + 64) * 4 // 8
