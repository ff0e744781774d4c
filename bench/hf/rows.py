"""Rows of the table: one model each."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from bench.hf.compared import Asked, Outcome, sharded, told, unsharded
from bench.hf.models import Case
from bench.hf.unprepared import check_size
from graphshard.testing import RankFailed, pool

_OF_EAGER = "eager FSDP2: "
# Where `check_parity` runs that, as tracebacks have it, those of a rank that died too.
_REFERENCE = "in _run_eager"
# What `compare_tensors` says of the element that is farthest.
_LARGEST = re.compile(r"largest: .*\((?P<apart>[^,)]*)(?:, (?P<size>[^)]*))?\)")


@dataclass(frozen=True)
class Row:
    """A model, compared twice.

    Attributes:
        missing: the package that the model needs and that is not there; empty: none.
        plain: unsharded; None: not run.
        ours: sharded; None: not run.
    """

    case: Case
    missing: str = ""
    plain: Outcome | None = None
    ours: Outcome | None = None

    @property
    def failed(self) -> bool:
        """Whether sharding makes a difference that compiling alone does not."""
        same = self.ours is not None and (self.ours.bitwise or _of_eager(self.ours))
        return bool(self.plain and self.plain.bitwise and not same)

    def cells(self) -> tuple[str, ...]:
        """Of the table."""
        head = (self.case.name, self.case.model)
        if self.missing:
            return (*head, f"needs {self.missing}", *["-"] * 6)
        counts: list[str] = ["-"] * 5
        if self.ours and self.ours.programs:
            numbers = (self.ours.units, self.ours.breaks, self.ours.regions, self.ours.programs, self.ours.outside)
            counts = [str(number) for number in numbers]
        return (*head, _cell(self.plain), _cell(self.ours), *counts)

    def lines(self, *, details: bool) -> list[str]:
        """Below the table: what is not bitwise, and what ran in eager."""
        told = []
        for name, outcome in (("unsharded", self.plain), ("sharded", self.ours)):
            if outcome is not None and outcome.problem:
                first, *rest = outcome.problem.splitlines()
                told += [
                    f"{self.case.name}, {name}: {first}",
                    *(f"  {line}" for line in rest[: None if details else 2]),
                ]
        if self.ours is not None and details:
            told += [f"{self.case.name}: {self.ours.report}"]
        return told


def compare(asked: Asked, num_ranks: int, timeout_s: float) -> Row:
    """Runs both comparisons of a model on ranks, unless it cannot be built."""
    try:
        check_size(asked.case)
        asked.build()
    except ImportError as error:
        return Row(asked.case, error.name or str(error).strip().splitlines()[0])
    except Exception as error:  # whatever a class that nobody prepared says of a small configuration
        return Row(asked.case, plain=Outcome(told(error)))
    plain, ours = (_run(num_ranks, function, asked, timeout_s) for function in (unsharded, sharded))
    return Row(asked.case, plain=plain, ours=ours)


def _run(num_ranks: int, function: Callable[[Asked], Outcome | None], asked: Asked, timeout_s: float) -> Outcome:
    try:
        outcomes = pool(num_ranks).run(function, asked, timeout_s=timeout_s)
    except RankFailed as failure:
        where = _OF_EAGER if _REFERENCE in str(failure) else ""
        return Outcome(f"{where}{next(iter(failure.failures.values())).error}\n{failure}")
    ran = [outcome for outcome in outcomes if outcome is not None]
    return next((outcome for outcome in ran if outcome.problem), ran[0])


def _of_eager(outcome: Outcome) -> bool:
    """Whether eager FSDP2 fails, with which it was to be compared: experts of which one rank uses others, say."""
    return outcome.problem.startswith(_OF_EAGER)


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return "-"
    if outcome.bitwise:
        return "bitwise"
    if not outcome.differs:
        return "eager fails" if _of_eager(outcome) else "ERROR"
    found = _LARGEST.search(outcome.problem)
    what = outcome.problem.split(maxsplit=1)[0].rstrip(":,")
    return f"{what} {found['size'] or found['apart']}" if found else f"{what} DIFFERS"
