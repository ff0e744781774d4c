"""Files and messages that anyone may have written are data: read, or refused by a clear error; dumps are private."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from graphshard import env
from graphshard.compat import cache
from graphshard.cost.hardware_file import read_hardware
from graphshard.explain.chrome_trace import chrome_trace
from graphshard.faults.dumps import Dump, check_folder, read_dumps, write_dump
from graphshard.files import parse_json, read_limited
from graphshard.lowering import driver
from graphshard.plan_file import load_plan
from tests.fuzz.hostile import NAMES
from tests.fuzz.readers import STATUS, play, readers
from tests.graph.graphs import toy_forward, toy_weights
from tests.graph.planned_programs import explanation, gather, planned, problem
from tests.graph.test_explain_page import Page


@pytest.mark.parametrize("name", readers())
def test_hostile_input_is_read_or_refused(name: str) -> None:
    assert play(name, 200, seed=1).total() >= 100  # Hypothesis tries no input twice


# -- JSON


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b'{"a": 1, "a": 2}', "a: got it twice in one object"),
        (b"[NaN]", "got NaN, want a number"),
        (b"[-Infinity]", "got -Infinity, want a number"),
        (b"[1e999]", "got the number 1e999, want one that is finite"),
        (b"9" * 41, "got a number of 41 digits, want at most 40"),
        (b"[" * 101, "got more than 100 lists or objects in each other"),
        (b'{"a":' * 101, "got more than 100 lists or objects in each other"),
        (b'"\\ud800"', "surrogates not allowed"),
        (b"\xff", "can't decode byte"),
        (b"{\n,", "line 2: got no JSON"),
    ],
)
def test_what_is_no_data_is_refused(text: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_json(text)


def test_brackets_and_quotes_in_texts_do_not_nest() -> None:
    value = {"a": "[" * 500 + '\\"' + "{" * 500, "b": "\U0001f600"}
    assert parse_json(json.dumps(value)) == value
    assert parse_json("[" * 100 + "]" * 100)


# -- files


def test_large_files_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as opened:
        opened.truncate(2**40)  # a hole
    for read in (load_plan, read_hardware):
        with pytest.raises(ValueError, match=r"large: got more than \d+ bytes, want at most so many"):
            read(path)


def test_pipes_and_folders_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        for read in (load_plan, read_hardware):
            with pytest.raises(ValueError, match=r"got no regular file|Is a directory"):
                read(path)


def test_links_among_dumps_and_entries_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    cache.write_entry("ab12", b"1")
    assert cache.read_entry("ab12") == b"1"
    (entry,) = (path for path in (tmp_path / "cache").rglob("ab12") if path.is_file())
    entry.rename(tmp_path / "elsewhere")
    entry.symlink_to(tmp_path / "elsewhere")
    assert cache.read_entry("ab12") is None
    assert read_limited(entry, 10) == b"1"
    write_dump(tmp_path / "dumps", Dump("fault", 1.0, STATUS))
    (written,) = (tmp_path / "dumps").iterdir()
    (tmp_path / "dumps" / "linked.1.fault.json").symlink_to(written)
    dumps, refused = read_dumps(tmp_path / "dumps")
    assert len(dumps) == 1 and len(refused) == 1 and refused[0].startswith("linked.1.fault.json: ")


@pytest.mark.parametrize("key", ["../../x", "", "a/b", "a\x00", "ключ", "a.begun"])
def test_names_of_artifacts_are_no_paths(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    cache.PlanArtifact(key, b"1").populate_cache()
    assert not list(tmp_path.iterdir())


def modes(folder: Path) -> set[str]:
    return {f"{path.stat().st_mode & 0o777:o}" for path in folder.rglob("*") if path.is_file()}


def test_dumps_are_for_their_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHSHARD_DUMP", str(tmp_path / "made"))
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    assert write_dump(shared, Dump("fault", 1.0, STATUS)).startswith("dump: ")
    assert modes(shared) == {"600"}
    marked = toy_forward(toy_weights())
    driver.lower(marked.gm, marked.ctx, "program")
    assert modes(tmp_path / "made") == {"600"}
    assert f"{(tmp_path / 'made').stat().st_mode & 0o777:o}" == "700"


def test_the_default_folder_of_dumps_may_not_be_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "shared_fault_dir", lambda: tmp_path / "faults")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "faults").symlink_to(tmp_path / "theirs")
    assert "is a link or another user's" in check_folder(tmp_path / "faults")
    assert "is a link or another user's" in write_dump(tmp_path / "faults", Dump("fault", 1.0, STATUS))
    assert not list((tmp_path / "theirs").iterdir())


# -- what is shown


SHORT = (name for name in NAMES if 0 < len(name) < 100)
HOSTILE = (*SHORT, '"onload=alert(1) x="', "'", "\u202egnp", "\ud800", "]]>", "--><b>")


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_hostile_names_stay_names(name: str) -> None:
    of = problem((100.0, 10.0), (gather(f"{name}.a", 0), gather(f"{name}.b", 1)))
    program = planned(of, title=name, plan=name)
    program = replace(program, bucket_names=tuple(f"{name}{i}" for i in range(len(program.bucket_names))))
    plain = explanation(planned(of, title="t", plan="p"), notes=("n",))
    told = replace(explanation(program, notes=(name,)), hardware=name)
    tags, want = ([(tag, sorted(attrs)) for tag, attrs in Page(of.to_html()).seen] for of in (told, plain))
    assert tags == want
    told.to_html().encode()
    root = ElementTree.fromstring(told.to_svg())  # XML, whole
    assert [node.tag for node in root.iter()] == [node.tag for node in ElementTree.fromstring(plain.to_svg()).iter()]
    trace = json.loads(chrome_trace([program], name, [name]))
    assert trace["otherData"]["notes"] == [name]
