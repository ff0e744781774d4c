"""The sentence that says what happened, and `graphshard diagnose`, which reads it off dumps."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from graphshard.cli import main
from graphshard.faults import diagnose
from graphshard.faults.dumps import MAX_BYTES, Dump, check_folder, write_dump
from graphshard.faults.sentence import sentence
from graphshard.faults.status import Status, from_json, to_json

WAITING = Status(
    rank=0,
    host="a",
    pid=10,
    calls=13,
    doing="collective",
    where="train.py:30",
    program="the backward of region 0 of Net0",
    what="wait",
    index=2,
    bucket="reduce:blocks.1",
    fqns=("blocks.1.weight", "blocks.1.bias", "blocks.0.weight"),
    parameters=3,
    ranks=(0, 1),
    seconds=20.4,
    recent=((12, "the forward"), (13, "the backward [default]")),
)
OUTSIDE = Status(1, "b", 11, 12, "outside", where="train.py:31", recent=((12, "the forward"),))
HEAD = (
    "rank 0 has waited 20 s in the backward of region 0 of Net0 for bucket 'reduce:blocks.1' "
    "(blocks.1.weight, blocks.1.bias, ...)"
)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (OUTSIDE, "rank 1 is not in it: it is in train.py:31 (call 12, rank 0 at 13)"),
        (None, "rank 1 does not answer: it is dead or stopped"),
        (
            replace(OUTSIDE, doing="compiles", text="the backward of region 0", seconds=34.0),
            "rank 1 is not in it: it is compiling the backward of region 0, 34 s so far (call 12, rank 0 at 13)",
        ),
        (
            replace(WAITING, rank=1, index=4, bucket="reduce:blocks.0", fqns=("blocks.0.bias",), parameters=1),
            "rank 1 is not in it: it is in the backward of region 0 of Net0, at bucket 'reduce:blocks.0' "
            "(blocks.0.bias) (call 13, rank 0 at 13)",
        ),
        (
            replace(OUTSIDE, calls=13, recent=((13, "the backward [unreduced=6]"),)),
            "rank 1 is not in it: it is in train.py:31 (call 13, rank 0 at 13); they differ since call 13: "
            "the backward [default] on rank 0, the backward [unreduced=6] on rank 1",
        ),
        (
            replace(WAITING, rank=1, doing="failed"),
            "rank 1 is not in it: it is behind a collective that failed there (call 13, rank 0 at 13)",
        ),
        (
            replace(WAITING, rank=1, doing="program", calls=14),
            "rank 1 is not in it: it is computing in the backward of region 0 of Net0 (call 14, rank 0 at 13)",
        ),
        (
            replace(WAITING, rank=1, calls=14, fqns=("blocks.1.bias",), parameters=1),
            "rank 1 is not in it: it is in the backward of region 0 of Net0, at bucket 'reduce:blocks.1' "
            "(blocks.1.bias) (call 14, rank 0 at 13)",
        ),
        (
            replace(WAITING, rank=1, calls=14, bucket="all_reduce", parameters=0, recent=()),
            "rank 1 is not in it: it is in the backward of region 0 of Net0, at 'all_reduce', a collective of the "
            "model's own (call 14, rank 0 at 13)",
        ),
        (
            replace(WAITING, rank=1),
            "all ranks of its group are in it: look for the network, or an earlier difference between ranks",
        ),
    ],
)
def test_sentence_says_what_the_missing_rank_does(other: Status | None, said: str) -> None:
    assert sentence(WAITING, {1: other}) == f"{HEAD}; {said}"


def test_sentence_says_whether_it_waits_launches_or_has_failed() -> None:
    alone = replace(WAITING, ranks=(0,))
    assert sentence(alone, {}) == HEAD
    place = HEAD.partition(" s ")[2].replace("for bucket", "at the launch of bucket")
    assert sentence(replace(alone, what="launch"), None) == f"rank 0 has stood for 20 s {place}"
    assert sentence(replace(alone, doing="failed"), None).startswith(
        "rank 0 could not go on in the backward of region 0"
    )


def test_sentence_counts_only_ranks_of_the_group_and_joins_those_alike() -> None:
    first = replace(WAITING, ranks=tuple(range(0, 14, 2)))
    others: dict[int, Status | None] = dict.fromkeys(range(1, 14))
    others[4] = replace(WAITING, rank=4)
    assert sentence(first, others).split("; ")[1:] == [
        "ranks 2, 6, 8, 10 and 1 more do not answer: they are dead or stopped"
    ]
    others[10] = replace(WAITING, rank=10)
    assert sentence(first, others).endswith("; ranks 2, 6, 8, 12 do not answer: they are dead or stopped")


def test_sentence_without_a_store_blames_nobody() -> None:
    assert sentence(WAITING, None) == f"{HEAD}; what the other ranks do is not known: the store does not answer"


def test_status_survives_json_and_nothing_else_does() -> None:
    assert from_json(json.loads(to_json(WAITING))) == WAITING
    good = asdict(WAITING)
    hostile: list[tuple[str, Any]] = [
        ("rank", True),
        ("rank", "0"),
        ("rank", 1e300),
        ("doing", "sleeping"),
        ("bucket", None),
        ("where", "x" * 10_000),
        ("ranks", {"0": 1}),
        ("fqns", [1]),
        ("seconds", float("nan")),
        ("seconds", -1),
        ("recent", [[1]]),
    ]
    for name, value in hostile:
        with pytest.raises(ValueError, match=f"status: {name}: got"):
            from_json({**good, name: value})
    with pytest.raises(ValueError, match="got no 'pid'"):
        from_json({name: value for name, value in good.items() if name != "pid"})
    assert from_json({**good, "where": "\x1b[2J"}).where == "?[2J"


def told(folder: Path) -> str:
    out = io.StringIO()
    diagnose(folder, out)
    return out.getvalue()


def test_diagnose_tells_the_latest_fault_from_the_rank_that_asked(tmp_path: Path) -> None:
    write_dump(tmp_path, Dump("old", 5.0, WAITING, {1: None}, asked=True))
    write_dump(tmp_path, Dump("new", 90.0, WAITING, {1: None}, asked=True))
    write_dump(tmp_path, Dump("new", 91.0, OUTSIDE))
    text = told(tmp_path)
    # What rank 1 wrote itself counts more than that its answer came too late.
    assert text.startswith(f"1970-01-01 00:01:30 UTC: {HEAD}; rank 1 is not in it: it is in train.py:31 ")
    assert [line.split()[:3] for line in text.splitlines()[3:5]] == [["0", "a", "10"], ["1", "b", "11"]]
    assert "1 other faults in this folder are older" in text


def test_diagnose_without_the_dump_of_the_rank_that_asked_blames_nobody_it_does_not_know(tmp_path: Path) -> None:
    write_dump(tmp_path, Dump("new", 91.0, replace(WAITING, rank=2, ranks=(0, 1, 2))))
    write_dump(tmp_path, Dump("new", 91.0, OUTSIDE))
    text = told(tmp_path)
    assert "rank 1 is not in it" in text
    assert "rank 0" not in text
    assert "the dump of the rank that asked the others is not here" in text


def test_diagnose_goes_on_past_files_that_are_no_dumps(tmp_path: Path) -> None:
    write_dump(tmp_path, Dump("new", 91.0, WAITING, {1: OUTSIDE}, asked=True))
    whole = next(tmp_path.iterdir()).read_text()
    garbage = {
        "half": whole[: len(whole) // 2],
        "binary": b"\xff\x00\x80",
        "deep": "[" * 100_000,
        "other": "{}",
        "large": " " * (MAX_BYTES + 1),
        "answers": whole.replace('"1": {', '"one": {', 1),
        "empty": "",
    }
    for name, contents in garbage.items():
        (tmp_path / f"{name}.fault.json").write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    (tmp_path / "folder.fault.json").mkdir()
    text = told(tmp_path)
    assert HEAD in text
    assert text.count("not read: ") == len(garbage) + 1


def test_diagnose_says_that_there_is_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(tmp_path)]) == 2
    assert "got no dump in" in capsys.readouterr().err
    assert main(["diagnose", str(tmp_path / "missing")]) == 2
    assert "want a folder of dumps (GRAPHSHARD_FAULTS)" in capsys.readouterr().err
    write_dump(tmp_path, Dump("new", 91.0, WAITING, None, asked=True))
    assert main(["diagnose", str(tmp_path)]) == 0
    assert "the store does not answer" in capsys.readouterr().out


def test_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert "Not a directory" in check_folder(file / "below")
    assert check_folder(tmp_path / "new" / "deep") == ""
    assert write_dump(file / "below", Dump("new", 91.0, WAITING)).startswith("no dump: ")


def test_sentence_has_what_an_error_of_a_silent_rank_had_said() -> None:
    first = replace(WAITING, ranks=(0, 1, 2))
    said = sentence(first, {1: None, 2: None}, {1: "contract: rank 1 waited 20 s for rank 0"})
    assert said.endswith(
        "; rank 1 does not answer: it is dead or stopped, its last error: contract: rank 1 waited 20 s for rank 0; "
        "rank 2 does not answer: it is dead or stopped"
    )
