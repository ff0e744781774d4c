"""The docs say what is there: messages, options, passes, links, versions."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path

import pytest

import graphshard
from docs.tools import troubleshooting
from docs.tools.links import Link, anchors, dead, links, pages
from docs.tools.messages import ROOT, Message, Sources, Unread
from graphshard import passes
from graphshard.cli import main

DOCS = ROOT / "docs"
LARGEST_PICTURE = 100_000  # bytes


def text(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def test_every_message_stands_under_its_cause_and_fix() -> None:
    said = list(Sources().said())
    assert len(said) > 300
    page = text("troubleshooting.md")
    made, wrong = troubleshooting.written(page, said)
    assert not wrong, "\n".join(wrong)
    assert made == page, "run: python -m docs.tools.troubleshooting"
    assert all(re.search(r"[.:]\n\n<!-- messages: " + re.escape(" ".join(f.places)), page) for f in families())


def families() -> list[troubleshooting.Family]:
    return troubleshooting.families(text("troubleshooting.md"))


SOURCE = """
class Odd(ValueError):
    pass

def check(model, where, words):
    begin = f"compile: {where}"
    if not model:
        raise Odd(f"{begin}: got {model!r}, want a model that is one" if where else "got no place for it")
    report.say_once(f"{model} runs in eager code")
    raise ValueError(words)
"""


def test_messages_are_seen_however_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text(SOURCE)
    assert set(Sources(tmp_path).said()) == {
        Message("new.py", "check", "Odd", "compile: …: got …, want a model that is one"),
        Message("new.py", "check", "Odd", "got no place for it"),
        Message("new.py", "check", "report", "… runs in eager code"),
        Unread("new.py", "check", "words"),
    }


def test_a_message_of_no_list_is_named() -> None:
    page = "## Odd\n\nWhy.\n\n<!-- messages: a.py:one -->\n<!-- end of messages -->\n"
    said = [Message("a.py", "one.inner", "ValueError", "got no `x`"), Message("a.py", "two", "TypeError", "got no y")]
    made, wrong = troubleshooting.written(page, said)
    assert "* `` got no `x` `` (ValueError)\n" in made
    assert wrong[0] == "graphshard/a.py: two: in no list of troubleshooting.md: got no y"


def test_links_lead_somewhere() -> None:
    found = [link for page in pages() for link in links(page)]
    assert len(found) > 80
    assert not (wrong := [said for link in found if (said := dead(link))]), "\n".join(wrong)


@pytest.mark.parametrize(
    "target", ["limits.md#no-such", "no-such.md", "../../outside.md", "#no-such", "pictures/timeline.svg#x"]
)
def test_dead_links_are_seen(target: str) -> None:
    assert target in dead(Link(DOCS / "index.md", 1, target))


def test_anchors_are_those_of_headings() -> None:
    assert {"a-pass", "deprecation", "what-a-change-has-to-show"} <= anchors(DOCS / "contributing.md")


def test_every_page_has_a_place_in_the_navigation() -> None:
    named = re.findall(r"^([\w-]+)$", "".join(re.findall(r"```\{toctree\}(.*?)```", text("index.md"), re.DOTALL)), re.M)
    assert sorted([*named, "index"]) == sorted(page.stem for page in DOCS.glob("*.md"))


def test_pictures_are_small() -> None:
    pictures = list((DOCS / "pictures").iterdir())
    assert len(pictures) >= 2
    assert all(picture.suffix == ".svg" and picture.stat().st_size < LARGEST_PICTURE for picture in pictures)


def test_options_and_variables_are_all_listed() -> None:
    page = text("options.md")
    listed = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|([^|]*)\|", page, re.MULTILINE))))
    assert set(inspect.signature(graphshard.compile).parameters) - {"model", "mesh"} <= listed
    sources = "".join(path.read_text() for path in (ROOT / "graphshard").rglob("*.py"))
    read = set(re.findall(r"os\.environ(?:\.get\(|\[)\"(GRAPHSHARD_\w+)", sources))
    assert {"GRAPHSHARD_DUMP", "GRAPHSHARD_DISABLE"} <= read <= listed


def test_passes_are_all_listed_in_their_order() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", text("passes.md"), re.MULTILINE)
    split, *others = passes.JOINT
    steps = [*passes.CAPTURED, passes.COLLAPSE, split, passes.EXPAND, *others, *passes.PROGRAM]
    assert rows == list(dict.fromkeys(step.name for step in steps))
    (disable,) = re.findall(r"^\| `GRAPHSHARD_DISABLE` \|(.*)", text("options.md"), re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", disable)) == {step.name for step in steps if step.optional}


def test_the_reference_has_all_public_names() -> None:
    page = text("api.md")
    missing = [name for name in graphshard.__all__ if not re.search(rf"auto\w+:: graphshard\.{name}\n", page)]
    assert not missing


def test_versions_and_extras_are_the_same_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == graphshard.__version__
    assert f"\nversion: {graphshard.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    newest = re.search(r"^## (\S+) ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] == graphshard.__version__
    listed = dict(re.findall(r"^\| `(\w+)` \| ([\w\- ,]+) \|", text("install.md"), re.MULTILINE))
    extras = {
        name: [re.split("[<>=]", one)[0] for one in wanted] for name, wanted in project["optional-dependencies"].items()
    }
    assert {name: words.split(", ") for name, words in listed.items()} == extras
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"graphshard {graphshard.__version__} (torch ")
