"""The table of semantics and the tests that show it; the report that runs them."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from graphshard.testing.report import Shown, main, row_state
from graphshard.testing.rows import ROWS, Row

DIST = Path(__file__).resolve().parents[1] / "dist"


@dataclass(frozen=True)
class RowMark:
    """A `pytest.mark.row(...)` in a source file: above a test or a class, on a parameter, or of a whole module."""

    place: str
    ids: tuple[object, ...]
    fallback: object


def row_marks(path: Path) -> Iterator[RowMark]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.row":
            place = f"{path.name}:{node.lineno}"
            options = {keyword.arg: literal(keyword.value, place) for keyword in node.keywords}
            assert options.keys() <= {"fallback"}, f"{place}: row(*ids, fallback=None)"
            yield RowMark(place, tuple(literal(argument, place) for argument in node.args), options.get("fallback"))


def literal(node: ast.expr, place: str) -> object:
    assert isinstance(node, ast.Constant), f"{place}: want literals in row(...), got {ast.unparse(node)}"
    return node.value


@pytest.fixture(scope="module")
def marks() -> list[RowMark]:
    return [mark for path in sorted(DIST.glob("**/test_*.py")) for mark in row_marks(path)]


def test_rows_have_each_id_once() -> None:
    counts = {"S": 39, "R": 17, "B": 1, "A": 3, "P": 4}
    numbered = [f"{letter}{number}" for letter, count in counts.items() for number in range(1, count + 1)]
    assert [row.id for row in ROWS] == [*numbered, "state", *(f"X{number}" for number in range(1, 12))]


def test_rows_without_a_test_say_why() -> None:
    assert {row.id for row in ROWS if row.demand != "test"} == {row.id for row in ROWS if row.note}


def test_rows_in_marks_are_known(marks: list[RowMark]) -> None:
    known = {row.id for row in ROWS}
    wrong = [f"{mark.place}: {mark.ids}" for mark in marks if not mark.ids or not known.issuperset(mark.ids)]
    assert not wrong, "\n".join(["no such row, or none named:", *wrong])
    unsaid = [mark.place for mark in marks if not isinstance(mark.fallback, str | None)]
    assert not unsaid, f"fallback: want the reason, as a string: {unsaid}"


def test_rows_are_each_named_by_a_test(marks: list[RowMark]) -> None:
    named = {name for mark in marks for name in mark.ids}
    missing = [f"{row.id}: {row.title}" for row in ROWS if row.demand == "test" and row.id not in named]
    assert not missing, "\n".join(["rows that no test in tests/dist names:", *missing])


def test_row_marks_are_found_in_each_form(tmp_path: Path) -> None:
    file = tmp_path / "test_forms.py"
    file.write_text(
        "import pytest\n"
        "pytestmark = pytest.mark.row('S1')\n"
        "@pytest.mark.row('S2', 'R3', fallback='why')\n"
        "@pytest.mark.parametrize('x', [pytest.param(1, marks=[pytest.mark.row('S4')])])\n"
        "def test_it(x): ...\n"
    )
    found = list(row_marks(file))
    assert {name for mark in found for name in mark.ids} == {"S1", "S2", "R3", "S4"}
    assert {mark.fallback for mark in found} == {None, "why"}


WANTED, CUDA, NOTHING = (
    Row("S1", "a"),
    Row("S39", "b", "cuda", "CUDA graphs"),
    Row("P2", "c", "nothing", "nothing there"),
)
PASSED, FAILED, SKIPPED = Shown("t::a", "passed"), Shown("t::b", "failed"), Shown("t::c", "skipped")
EAGER, NOT_RUN = Shown("t::d", "passed", "no kernel"), Shown("t::e")


@pytest.mark.parametrize(
    ("row", "tests", "state", "why"),
    [
        (WANTED, [], "not shown", ""),
        (WANTED, [SKIPPED, NOT_RUN], "not shown", ""),
        (WANTED, [PASSED, SKIPPED], "compiled", ""),
        (WANTED, [PASSED, EAGER], "eager fallback", "no kernel"),
        (WANTED, [EAGER, FAILED], "failing", ""),
        (CUDA, [SKIPPED], "needs CUDA", "CUDA graphs"),
        (CUDA, [PASSED], "compiled", ""),
        (NOTHING, [], "nothing to show", "nothing there"),
    ],
)
def test_row_state_follows_its_tests(row: Row, tests: list[Shown], state: str, why: str) -> None:
    found = row_state(row, tests)
    assert (found.state, found.why) == (state, why)


def test_report_names_the_missing_tests_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], tmp_path) == 2
    assert str(tmp_path / "tests" / "dist") in capsys.readouterr().err


def test_report_refuses_unknown_rows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["S12", "S99"])
    assert "no such row: S99" in capsys.readouterr().err


SUITE = """
import pytest
@pytest.mark.row("S1", "R1")
@pytest.mark.parametrize("x", [1, pytest.param(2, marks=pytest.mark.row("S2", fallback="not there"))])
def test_passes(x): ...
@pytest.mark.row("R1")
def test_fails(): assert False
@pytest.mark.row("S3")
def test_not_asked_for(): raise SystemExit
@pytest.mark.row("S4")
@pytest.mark.skip
def test_skipped(): ...
def test_of_no_row(): assert False
"""


def test_report_runs_the_tests_of_the_rows(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['row(*ids, fallback=None)']\n")
    folder = tmp_path / "tests" / "dist"
    folder.mkdir(parents=True)
    (folder / "test_suite.py").write_text(SUITE)
    (folder / "test_broken.py").write_text("import there_is_no_such_module\n")
    # A process of its own: pytest inside pytest would share plugins, such as the watchdog for tests that hang.
    call = "import sys; from pathlib import Path; from graphshard.testing.report import main\n"
    call += "sys.exit(main(sys.argv[2:], Path(sys.argv[1])))"
    table = tmp_path / "rows.json"
    arguments = [str(tmp_path), "S1", "s2", "S4", "S39", "R1", "--json", str(table)]
    command = [sys.executable, "-c", call, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    rows = {row["id"]: row for row in json.loads(table.read_text())}
    states = {name: row["state"] for name, row in rows.items()}
    assert states == {
        "S1": "compiled",
        "S2": "eager fallback",
        "S4": "not shown",
        "S39": "needs CUDA",
        "R1": "failing",
    }
    assert "test_broken.py" in done.stdout.split("could not be imported: ")[1]
    # The table itself: a line for each row, then its tests.
    assert "S2     a forward without inputs: eager fallback (not there)\n" in done.stdout
    assert "failed: tests/dist/test_suite.py::test_fails\n" in done.stdout
    assert "5 rows: 1 compiled, 1 eager fallback, 1 not shown, 1 needs CUDA, 1 failing\n" in done.stdout
