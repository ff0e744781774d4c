"""The command line, in this process: what it prints, on which stream, and its exit status."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from plans import backward, forward, plan_of

import graphshard
from graphshard.cli import main
from graphshard.cost import HARDWARE
from graphshard.plan_file import Plan, write_plan
from graphshard.planner import Problem, Schedule, fsdp2_schedule, per_parameter_schedule
from graphshard.reporting.table_text import plain_table, write_table

ROOT = Path(__file__).resolve().parents[2]
SCALE = "graphshard.scale.command"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two plans of a forward and its backward, in the working directory."""
    monkeypatch.chdir(tmp_path)
    write_plan(plan(fsdp2_schedule, ()), "a.json")
    write_plan(plan(per_parameter_schedule, ("blocks.1",)), "b.json")
    return tmp_path


def plan(make: Callable[[Problem], Schedule], kept: tuple[str, ...]) -> Plan:
    return plan_of(*((0, "default", problem, make(problem)) for problem in (backward(), forward())), kept=kept)


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_version_is_printed_with_what_it_runs_on(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = ran(capsys, "--version")
    assert (status, err) == (0, "") and out.startswith(
        f"graphshard {graphshard.__version__} (torch {torch.__version__}, "
    )


def test_show_prints_every_bucket(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = ran(capsys, "plan", "show", "b.json")
    assert (status, err) == (0, "")
    assert_expected_inline(
        out,
        """\
b.json: mode auto, at most FSDP2's memory, for h100 (0123456789abcdef); graphshard 0.1.0, torch 2.13.0; programs: 2

region 0 backward [default]: search, outline 897e43519f291d09
  450.1 us, of which 225.1 us exposed; at least 327.6 us; 13,320 of 13,320 bytes
  bucket             parameters  bytes  launch  wait    finish
  gather:blocks.1             1  4,096  0 mm    0 mm
  gather:blocks.1#2           1     64  0 mm    0 mm
  reduce:blocks.1             1  4,096  1 relu  1 relu
  reduce:blocks.1#2           1     64  1 relu  1 relu
  gather:blocks.0             1  4,096  2 mm_1  2 mm_1
  reduce:blocks.0             1  4,096  end     end

region 0 forward [default]: search, outline d31b4643066e75ea
  337.6 us, of which 112.6 us exposed; at least 276.6 us; 10,096 of 10,096 bytes
  stay gathered: blocks.1
  bucket             parameters  bytes  launch  wait    finish
  gather:blocks.1             1  4,096  0 mm    0 mm
  gather:blocks.1#2           1     64  0 mm    0 mm
  gather:blocks.0             1  4,096  2 mm_1  2 mm_1
""",
    )


def test_diff_says_what_differs_by_its_status(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(capsys, "plan", "diff", "a.json", "a.json") == (0, "", "")
    status, out, err = ran(capsys, "plan", "diff", "a.json", "b.json")
    assert (status, err) == (1, "")
    assert out.startswith("region 0 backward [default]:\n")
    assert "\nregion 0 forward [default]:\n" in out
    assert "  kept: none in a.json and blocks.1 in b.json\n" in out


def test_check_says_whether_a_file_is_sound(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sound = "a.json: sound; programs: 2. Whether it fits a model says graphshard.compile(model, plan=FILE)\n"
    assert ran(capsys, "plan", "check", "a.json") == (0, sound, "")
    content = json.loads((files / "a.json").read_text())
    content["programs"][0]["region"] = -1
    (files / "a.json").write_text(json.dumps(content))
    status, out, err = ran(capsys, "plan", "check", "a.json")
    assert (status, out) == (2, "")
    assert err == (
        "graphshard: plan file a.json: programs[0].region: got -1, want a whole number from 0 up; correct it, or plan "
        "anew with plan='auto' and save\n"
    )


def studied(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """Stands for the command that traces models."""
    seen: list[argparse.Namespace] = []

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model", required=True)
        parser.add_argument("--tokens", type=int, default=1)

    def run(arguments: argparse.Namespace) -> int:
        seen.append(arguments)
        return 0

    module: Any = SimpleNamespace(add_arguments=add_arguments, run=run)
    monkeypatch.setitem(sys.modules, SCALE, module)
    return seen


def test_plan_with_a_model_plans_it(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = studied(monkeypatch)
    assert ran(capsys, "plan", "--model", "mine:build", "--tokens", "3") == (0, "", "")
    assert vars(seen[0]) == {"model": "mine:build", "tokens": 3}
    monkeypatch.setitem(sys.modules, SCALE, None)
    status, out, err = ran(capsys, "plan", "--model", "mine:build")
    assert (status, out, err.count("\n")) == (2, "", 1)


def test_hardware_prints_every_row_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = ran(capsys, "hardware")
    assert (status, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()[1:-1]] == list(HARDWARE)
    for row in HARDWARE.values():
        status, out, err = ran(capsys, "hardware", row.name)
        assert (status, err) == (0, "")
        assert all(source in out for source in row.sources.values())
        assert "no source" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["hardware", "h300"],
            "hardware: got 'h300', want one of a100, b200, cpu-gloo, h100, h100-500w, h200, or the path of",
        ),
        (["plan", "show", "none.json"], "plan file none.json: No such file or directory; want a file that graphshard."),
        (["plan", "diff", "a.json"], "the following arguments are required: B"),
        (["plan", "draw", "a.json"], "invalid choice: 'draw'"),
        (["plan", "check", "a.json", "--tokens", "3"], "unrecognized arguments: --tokens 3"),
        (["plan"], "the following arguments are required: COMMAND"),
        ([], "the following arguments are required: COMMAND"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_end_with_status_2_and_one_error(
    files: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    status, out, err = ran(capsys, *arguments)
    assert (status, out) == (2, "")
    assert message in err.splitlines()[-1]


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = ran(capsys, "--help")
    assert status == 0
    assert all(
        f"graphshard {name}" in out for name in ("plan show", "plan diff", "plan check", "plan --model", "hardware")
    )


def test_help_of_plan_says_where_that_of_planned_models_is(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = ran(capsys, "plan", "--help")
    assert status == 0
    assert "`graphshard plan --model M --help`" in " ".join(out.split())
    status, out, _ = ran(capsys, "plan", "--model", "llama3-8b", "--help")
    assert status == 0
    assert "--checkpointing" in out


def test_module_runs_as_the_command(files: Path) -> None:
    command = [sys.executable, "-m", "graphshard", "plan", "diff", "a.json", "b.json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(ROOT)})
    assert (ended.returncode, ended.stderr) == (1, "")
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"graphshard": f"{main.__module__}:{main.__name__}"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_reader_that_has_read_enough_ends_it_silently() -> None:
    command = [sys.executable, "-m", "graphshard", "hardware"]
    environment = {"PYTHONPATH": str(ROOT)}
    ran = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert ran.stdout is not None
    ran.stdout.close()
    _, said = ran.communicate(timeout=120)
    assert (ran.returncode, said) == (0, "")


def test_table_is_drawn_on_a_terminal_where_rich_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    columns, rows = ("name", ">bytes"), [["a[b]", "1"], ["c", "1000"]]
    plain = plain_table(columns, rows)
    assert plain == "  name  bytes\n  a[b]      1\n  c      1000\n"
    piped = io.StringIO()
    write_table(piped, columns, rows, "title")
    assert piped.getvalue() == f"title\n{plain}"
    monkeypatch.setitem(sys.modules, "rich", None)
    terminal = Terminal()
    write_table(terminal, columns, rows, "title")
    assert terminal.getvalue() == piped.getvalue()


def test_table_of_rich_holds_the_same_texts() -> None:
    pytest.importorskip("rich")
    terminal = Terminal()
    write_table(terminal, ("name", ">bytes"), [["a[b]", "1000"]], "title")
    assert all(text in terminal.getvalue() for text in ("title", "name", "bytes", "a[b]", "1000", "─"))
