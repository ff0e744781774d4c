"""What a rank says of itself, and what is believed of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphshard.faults.activity import ENTRIES, REMEMBERED, Activity
from graphshard.faults.diagnose import first_and_others
from graphshard.faults.dumps import MAX_BYTES, Dump, read_dumps, write_dump
from graphshard.faults.place import Place
from graphshard.faults.status import MAX_FQNS, Status, status_of, user_line
from graphshard.reporting.report import ProgramRecord

RECORD = ProgramRecord(0, "backward", "default", {}, 0.0, 0.0)
PLACE = Place(2, "wait", "gather:a", tuple(f"a.{i}" for i in range(MAX_FQNS + 1)), "0")
OUTSIDE = Status(1, "b", 11, 12, "outside", ranks=(0, 1))


def test_rank_says_what_it_does() -> None:
    activity = Activity()
    assert status_of(0, activity, None).doing == "outside"
    tracing = status_of(0, activity, None, text="what Dynamo traces")
    assert (tracing.doing, tracing.text) == ("compiles", "what Dynamo traces")
    activity.set_compiling("the backward")
    compiling = status_of(0, activity, None)
    assert (compiling.doing, compiling.text) == ("compiles", "the backward")
    activity.set_compiling("")
    activity.begin(1, "Net0", RECORD, ())
    assert status_of(0, activity, None).doing == "program"
    assert status_of(0, activity, PLACE).doing == "collective"
    assert status_of(0, activity, PLACE, failed=True).doing == "failed"


def test_rank_has_failed_until_it_runs_another_program() -> None:
    activity = Activity()
    activity.begin(1, "Net0", RECORD, ())
    activity.end()
    activity.failure = (1, "a collective failed")
    assert status_of(0, activity, None).doing == "failed"
    activity.begin(1, "Net0", RECORD, ())
    activity.end()
    assert status_of(0, activity, None).doing == "outside"


def test_status_is_short_and_its_last_runs_in_order() -> None:
    activity = Activity()
    for _ in range(REMEMBERED + 2):
        activity.begin(1, "Net0", RECORD, ())
    found = status_of(0, activity, PLACE)
    assert [number for number, _ in found.recent] == list(range(3, REMEMBERED + 3))
    assert (found.fqns, found.parameters) == (PLACE.fqns[:MAX_FQNS], MAX_FQNS + 1)
    assert len(status_of(0, Activity(), None, text="x" * 10_000).text) < 5_000


def test_line_of_the_user_is_that_which_called_the_program() -> None:
    def program() -> str:
        return user_line()

    def entry() -> str:
        return program()

    inner = program()
    ENTRIES.add(entry.__code__)
    try:
        outer = entry()
    finally:
        ENTRIES.discard(entry.__code__)
    lines = [int(line.removeprefix("test_fault_status.py:")) for line in (inner, outer)]
    assert lines[0] == program.__code__.co_firstlineno + 1
    assert lines[1] > entry.__code__.co_firstlineno + 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fault": "\x1b[2J"}, "want its name"),
        ({"fault": "x" * 300}, "want its name"),
        ({"written": -1.0}, "want seconds since 1970"),
        ({"written": True}, "want seconds since 1970"),
        ({"answers": [1]}, "want an object by rank"),
        ({"stacks": {"main": "x" * MAX_BYTES}}, "bytes, want at most so many"),
        ({"graphshard_fault": 2}, "want a dump of a fault"),
    ],
)
def test_dump_that_no_rank_wrote_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    write_dump(tmp_path, Dump("new", 91.0, OUTSIDE))
    (file,) = tmp_path.iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    found, (refused,) = read_dumps(tmp_path)
    assert found == []
    assert said in refused


def test_fault_is_told_from_the_rank_that_asked_else_from_one_that_waits() -> None:
    waiting, computing = replace(OUTSIDE, doing="collective", seconds=1.0), replace(OUTSIDE, rank=0, seconds=9.0)
    dumps = [Dump("new", 91.0, status) for status in (computing, waiting)]
    assert first_and_others(dumps)[0].rank == 1
    asked = Dump("new", 91.0, computing, {0: waiting, 1: None}, asked=True)
    assert first_and_others([asked, dumps[1]]) == (computing, {1: waiting})
    silent = replace(asked, answers=None)
    assert first_and_others([silent]) == (computing, None)
    assert first_and_others([silent, dumps[1]]) == (computing, {1: waiting})
