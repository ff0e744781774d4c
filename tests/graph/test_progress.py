"""What is compiled, on a terminal."""

from __future__ import annotations

import io
import time

import pytest

from graphshard.reporting.progress import Progress


class Terminal(io.StringIO):
    """Says that it is one."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")


def compile_something(file: io.StringIO, patience_s: float) -> None:
    progress = Progress(file, patience_s)
    progress.begin("torch.compile traces")
    progress.begin("graphshard compiles the forward of region 0 of Net0")
    progress.count(2, 7)
    deadline = time.monotonic() + 0.5
    while "2 of 7" not in file.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    progress.end()
    progress.end()


def test_terminal_shows_what_is_compiled_and_how_much_of_it() -> None:
    file = Terminal()
    compile_something(file, patience_s=0.0)
    assert "graphshard compiles the forward of region 0 of Net0: 2 of 7" in file.getvalue()
    assert file.getvalue().endswith("\x1b[2K")  # the line is gone


def test_what_is_compiled_soon_is_not_shown() -> None:
    file = Terminal()
    compile_something(file, patience_s=60.0)
    assert file.getvalue() == ""


@pytest.mark.parametrize("dumb", ["pipe", "TERM"])
def test_pipes_and_dumb_terminals_get_nothing(dumb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO() if dumb == "pipe" else Terminal()
    if dumb == "TERM":
        monkeypatch.setenv("TERM", "dumb")
    compile_something(file, patience_s=0.0)
    assert file.getvalue() == ""


class Gone(Terminal):
    """A terminal that was closed."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(text)


class Logger:
    """What some programs put in the place of standard error."""

    def write(self, text: str) -> int:
        return len(text)


@pytest.mark.parametrize("kind", [Gone, Logger])
def test_terminal_that_is_gone_is_no_reason_to_stop(kind: type) -> None:
    progress = Progress(kind(), 0.0)
    for _ in range(2):
        progress.begin("one")
        time.sleep(0.2)
        progress.count(1, 2)
        progress.end()


def test_line_stays_while_something_is_compiled_and_comes_again() -> None:
    file = Terminal()
    progress = Progress(file, 0.0)
    for what in ("one", "another"):
        progress.begin(what)
        deadline = time.monotonic() + 5
        while what not in file.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        progress.end()
        assert what in file.getvalue()
    progress.end()  # one that was begun before anybody was told
