"""The page of `graphshard.debug`: whole, alone, and safe, whatever names are in it; and what is asked before."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import graphshard
from graphshard.debugging.dynamo_code import Frame
from graphshard.debugging.page import page
from graphshard.debugging.seen import SeenGraph, SeenModel, SeenProgram
from graphshard.reporting.artifacts import Snapshot
from graphshard.reporting.report import ProgramRecord, Report
from graphshard.state.model_context import ModelContext
from tests.graph.test_explain_page import BROWSER, Page

EVIL = '</pre></script><script>alert("1")</script><img src=x onerror=alert(2)>&\u202e'
SEEN = EVIL.replace("\u202e", "\ufffd")


def program(name: str, code: str | None, title: str) -> SeenProgram:
    record = ProgramRecord(0, "forward", name, {name: 1}, 0.1, 0.2, runs=3, ir=f"%{name}\n", code=code)
    return SeenProgram(title, record, 2)


def model(name: str = "Net0", lines: int = 30) -> SeenModel:
    text = "".join(f"%{i} = {name}\n" for i in range(lines))
    steps = (
        Snapshot(f"{name}.region0.0.forward", 0, "captured", "", text),
        Snapshot(f"{name}.region0.0.forward", 5, name, name, f"{text}%more = {name}\n"),
    )
    report = Report(fallbacks=[name], notes=[name], units=[name])
    context = ModelContext(name, report, mock.Mock(), mock.Mock())
    programs = [program(name, name, "one"), program(name, name, "two"), program(name, None, "")]
    return SeenModel(context, programs, [SeenGraph(f"{name}.captured", steps[:1]), SeenGraph(steps[0].title, steps, 2)])


def evil_page() -> str:
    frame = Frame(EVIL, EVIL, EVIL, EVIL, EVIL, EVIL, EVIL)
    return page([model(EVIL)], [EVIL], [frame], EVIL)


def test_page_escapes_names_wherever_they_come_from() -> None:
    text = evil_page()
    read = Page(text)
    assert [tag for tag, _ in read.seen].count("script") == 2 and "img" not in [tag for tag, _ in read.seen]
    assert "\u202e" not in text
    shown = "".join(read.text)
    assert shown.count(SEEN) > 15
    assert not [attrs for _, attrs in read.seen if any(name.startswith("on") for name in attrs)]


def test_page_needs_nothing_from_elsewhere() -> None:
    text = page([model(), model("Other1")], [], [], "")
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", text)
    assert not [attrs for _, attrs in Page(text).seen if {"src", "action"} & attrs.keys()]


def test_page_links_to_what_it_has() -> None:
    read = Page(page([model(), model("Other1")], [], [], "an error"))
    names = [attrs["id"] for _, attrs in read.seen if "id" in attrs]
    assert len(names) == len(set(names))
    links = [attrs["href"] for tag, attrs in read.seen if tag == "a"]
    assert links and {str(link).removeprefix("#") for link in links} <= set(names)


def test_page_without_anything_says_so() -> None:
    shown = "".join(Page(page([], ["Idle0"], [], "")).text)
    assert "no compiled model ran inside" in shown and "not run inside: Idle0" in shown
    assert "Dynamo compiled nothing inside" in shown


def test_page_shows_equal_code_once_and_says_what_was_compiled_before() -> None:
    shown = "".join(Page(page([model()], [], [], "")).text)
    assert shown.count("the same as above") == 1
    assert "1 of these programs were compiled before" in shown and "it runs operator by operator" in shown
    assert "+1 −0" in shown and "made 2 times" in shown


@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on the PATH")
def test_folded_lines_are_shown_when_they_are_unfolded(tmp_path: Path) -> None:
    acts = """<script>
    const folds = [...document.querySelectorAll(".pass .folded")];
    folds[0].open = true;
    folds[0].addEventListener("toggle", () => {
      document.title = [...folds[0].querySelectorAll("div")].map((line) => line.textContent.trim()).join(";");
    });
    </script></body>"""
    path = tmp_path / "page.html"
    path.write_text(page([model(lines=9)], [], [], "").replace("</body>", acts), encoding="utf-8")
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    command += ["--virtual-time-budget=2000", "--dump-dom", path.as_uri()]
    dumped = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    title = re.search("<title>(.*?)</title>", dumped)
    assert title is not None and title[1] == ";".join(f"%{i} = Net0" for i in range(6))


def test_missing_depyf_is_named_with_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "depyf", None)
    message = r"graphshard.debug: got no depyf, .* install it: pip install graphshard\[debug\]"
    with pytest.raises(ModuleNotFoundError, match=message), graphshard.debug(tmp_path / "made"):
        pass
    assert not list(tmp_path.iterdir())


@pytest.fixture
def _depyf(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is checked of folders needs none."""
    monkeypatch.setattr("graphshard.debugging.session.check_depyf", lambda: None)


@pytest.mark.usefixtures("_depyf")
def test_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "below"):
        with pytest.raises(NotADirectoryError, match=r"folder: got '.*file.*', a file"), graphshard.debug(folder):
            pass
    with pytest.raises(TypeError, match="folder: got int, want the path of a folder"), graphshard.debug(3):  # type: ignore[arg-type]
        pass
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="is a link or another user's"), graphshard.debug(tmp_path / "link"):
        pass


@pytest.mark.usefixtures("_depyf")
def test_nested_use_is_refused_and_ends_with_the_outer_one(tmp_path: Path) -> None:
    with graphshard.debug(tmp_path / "outer") as written:
        refused = pytest.raises(RuntimeError, match="debug: got one inside another, want one at a time")
        with refused, graphshard.debug(tmp_path / "inner"):
            pass
    assert written.is_file() and not (tmp_path / "inner" / "index.html").exists()
    shutil.rmtree(tmp_path / "outer")
    with graphshard.debug(tmp_path / "outer") as written:
        pass
    assert written.is_file()


@pytest.mark.usefixtures("_depyf")
def test_error_of_a_page_does_not_hide_that_of_the_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ZeroDivisionError), graphshard.debug(tmp_path / "folder") as written:
        written.mkdir()
        raise ZeroDivisionError
    assert "could not be written" in caplog.text
    with pytest.raises(OSError, match="irectory"), graphshard.debug(tmp_path / "folder"):
        pass
