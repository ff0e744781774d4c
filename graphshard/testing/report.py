"""Which rows of the table of semantics hold, by running the tests that show them.

    python -m graphshard.testing.report             # all rows
    python -m graphshard.testing.report S12 R8      # these
    python -m graphshard.testing.report --json FILE

It needs a source checkout, whose tests/dist has the tests. The exit status is 1 if a row is failing or not shown.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from graphshard.testing.rows import ROWS, Row

if TYPE_CHECKING:
    import pytest

Outcome = Literal["passed", "failed", "skipped"]

CHECKOUT = Path(__file__).resolve().parents[2]
BAD = ("failing", "not shown")


@dataclass
class Shown:
    """One test that names a row.

    Attributes:
        name: its node id.
        outcome: of its run; None: it was collected and did not run.
        fallback: why it runs in eager FSDP2; None: it runs compiled.
    """

    name: str
    outcome: Outcome | None = None
    fallback: str | None = None


@dataclass(frozen=True)
class RowState:
    """A row and what its tests say.

    Attributes:
        row: the row.
        state: ``"compiled"``, ``"eager fallback"``, ``"failing"``, ``"not shown"``, ``"needs CUDA"`` or
            ``"nothing to show"``.
        why: of a fallback.
        tests: those that name it.
    """

    row: Row
    state: str
    why: str
    tests: tuple[Shown, ...]

    def as_json(self) -> dict[str, object]:
        """For ``--json``."""
        tests = [asdict(test) for test in self.tests]
        return {"id": self.row.id, "title": self.row.title, "state": self.state, "why": self.why, "tests": tests}

    def __str__(self) -> str:
        state = f"{self.state} ({self.why})" if self.why else self.state
        return "\n".join([f"{self.row.id:5}  {self.row.title}: {state}", *_told(self.tests)])


def row_state(row: Row, tests: Sequence[Shown]) -> RowState:
    """What the tests of a row say about it: one that failed outweighs all others, then one that ran in eager FSDP2."""
    ran = [test for test in tests if test.outcome in ("passed", "failed")]
    fallbacks = dict.fromkeys(test.fallback for test in ran if test.fallback is not None)
    state, why = "compiled", ""
    if any(test.outcome == "failed" for test in ran):
        state = "failing"
    elif fallbacks:
        state, why = "eager fallback", "; ".join(fallbacks)
    elif not ran and row.demand == "test":
        state = "not shown"
    elif not ran:
        state, why = ("needs CUDA" if row.demand == "cuda" else "nothing to show"), row.note
    return RowState(row, state, why, tuple(tests))


def _told(tests: Sequence[Shown]) -> Iterator[str]:
    """A line for each test function, with its cases that did not pass by name."""
    cases: dict[str, list[Shown]] = {}
    for test in tests:
        cases.setdefault(test.name.split("[")[0], []).append(test)
    for function, its_cases in cases.items():
        passed = sum(case.outcome == "passed" for case in its_cases)
        yield f"       {function}" + (f" ({passed} of {len(its_cases)} passed)" if len(its_cases) > 1 else "")
        for case in its_cases:
            if case.outcome != "passed":
                yield f"         {case.outcome or 'did not run'}: {case.name}"


@dataclass(eq=False)  # pytest keeps its plugins in sets
class _Collector:
    """A pytest plugin: runs the tests that name one of `ids`, and keeps their outcomes by row."""

    ids: frozenset[str]
    by_row: dict[str, list[Shown]] = field(default_factory=dict)
    unimportable: list[str] = field(default_factory=list)
    _outcomes: dict[str, Outcome] = field(default_factory=dict)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen: list[pytest.Item] = []
        others: list[pytest.Item] = []
        for item in items:
            # The nearest mark counts, so that one case of a test may say otherwise than the test.
            reasons: dict[str, str | None] = {}
            for mark in item.iter_markers("row"):
                for name in mark.args:
                    reasons.setdefault(name, mark.kwargs.get("fallback"))
            wanted = {name: reason for name, reason in reasons.items() if name in self.ids}
            for name, reason in wanted.items():
                self.by_row.setdefault(name, []).append(Shown(item.nodeid, fallback=reason))
            (chosen if wanted else others).append(item)
        items[:] = chosen
        config.hook.pytest_deselected(items=others)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.unimportable.append(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or hasattr(report, "wasxfail"):  # an expected failure is none the less one
            self._outcomes[report.nodeid] = "failed"
        elif report.skipped:
            self._outcomes[report.nodeid] = "skipped"
        elif report.when == "call":
            self._outcomes[report.nodeid] = "passed"

    def finish(self) -> None:
        """Enters the outcomes."""
        for tests in self.by_row.values():
            for test in tests:
                test.outcome = self._outcomes.get(test.name)


def run_rows(rows: Sequence[Row], checkout: Path = CHECKOUT) -> tuple[list[RowState], list[str]]:
    """Runs the tests of `rows`, with pytest's own output.

    Args:
        rows: of `ROWS`.
        checkout: a source checkout of graphshard.

    Returns:
        The state of each row, and what else went wrong: files that could not be imported, a run that broke off.

    Raises:
        FileNotFoundError: if there is no tests/dist in the checkout.
        ModuleNotFoundError: if pytest is not installed.
    """
    folder = checkout / "tests" / "dist"
    if not folder.is_dir():
        raise FileNotFoundError(
            f"no {folder}: the tests are not in an installed graphshard; clone its repository and run this there"
        )
    import pytest  # here: it comes with the extra `test`

    collector = _Collector(frozenset(row.id for row in rows))
    # pyproject.toml's options tell of tests one by one, which the table does better.
    quiet = ["--override-ini", "addopts=--import-mode=importlib", "-q", "--no-header", "--tb=short"]
    go_on = "--continue-on-collection-errors"
    settings = [f"--rootdir={checkout}", "-c", str(checkout / "pyproject.toml")]
    status = pytest.main([str(folder), *settings, *quiet, go_on], plugins=[collector])
    collector.finish()
    wrong = [f"could not be imported: {file}" for file in collector.unimportable]
    if status in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
        wrong.append(f"pytest broke off: {pytest.ExitCode(status).name}")
    return [row_state(row, collector.by_row.get(row.id, [])) for row in rows], wrong


def main(arguments: Sequence[str] | None = None, checkout: Path = CHECKOUT) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m graphshard.testing.report", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("ids", nargs="*", metavar="ROW", help="rows to run, such as S12; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there, too")
    options = parser.parse_args(arguments)
    by_id: Mapping[str, Row] = {row.id.lower(): row for row in ROWS}
    if unknown := [name for name in options.ids if name.lower() not in by_id]:
        parser.error(f"no such row: {', '.join(unknown)}; there are {', '.join(row.id for row in ROWS)}")
    wanted = {name.lower() for name in options.ids} or by_id.keys()
    try:
        states, wrong = run_rows([row for name, row in by_id.items() if name in wanted], checkout)
    except (FileNotFoundError, ModuleNotFoundError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print("", *states, *wrong, "", _summary(states), sep="\n")
    if options.json is not None:
        options.json.write_text(json.dumps([state.as_json() for state in states], indent=2) + "\n", encoding="utf-8")
    return int(bool(wrong) or any(state.state in BAD for state in states))


def _summary(states: Sequence[RowState]) -> str:
    counts: dict[str, int] = {}
    for state in states:
        counts[state.state] = counts.get(state.state, 0) + 1
    return f"{len(states)} rows: " + ", ".join(f"{count} {state}" for state, count in counts.items())


if __name__ == "__main__":
    sys.exit(main())
