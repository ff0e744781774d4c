"""What was found in a model, to print or to read by a program."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from graphshard.reporting.report import by_place
from graphshard.reporting.table_text import plain_table

# Worst first. ignored: it does not do what it says, without any error, under eager FSDP2 as under graphshard.
VERDICTS = ("refused", "ignored", "eager", "handled")
_WIDTH = 56
_WHERE_WIDTH = 38
_SHOWN_PLACES = 4


@dataclass(frozen=True)
class Finding:
    """One thing, in all places where the model has it.

    Attributes:
        kind: a word or two; the same thing has the same kind in every model.
        where: FQNs of parameters or modules, ``""`` for the root, or a source line.
        what: it is, and what graphshard does with it.
        verdict: ``"handled"``: by compiled programs, with the results of eager FSDP2; ``"eager"``: outside the graphs,
            with the same results; ``"ignored"``: without effect and without an error, also in eager FSDP2;
            ``"refused"``: by an error.
        to_do: about it; ``""``: nothing.
    """

    kind: str
    where: tuple[str, ...]
    what: str
    verdict: str
    to_do: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """What `graphshard.doctor` found: print it.

    Attributes:
        model: name of its class.
        state: ``"plain"``, ``"annotated"`` or ``"compiled"``.
        shards: ranks that parameters are sharded over; None: not known.
        units: which units there are besides the root, and why: lines.
        findings: the worst first.
        not_looked_at: what would have needed more than was given, and what that is: lines.
    """

    model: str
    state: str
    shards: int | None
    units: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    not_looked_at: tuple[str, ...] = field(default=())

    @property
    def refused(self) -> tuple[Finding, ...]:
        """What ends in an error."""
        return tuple(finding for finding in self.findings if finding.verdict == "refused")

    def of_kind(self, kind: str) -> tuple[Finding, ...]:
        """What was found of one kind."""
        return tuple(finding for finding in self.findings if finding.kind == kind)

    def as_dict(self) -> dict[str, Any]:
        """All of it in dicts, lists, texts and numbers."""
        return asdict(self)

    def to_json(self) -> str:
        """The same as JSON."""
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        counts = Counter(finding.verdict for finding in self.findings)
        said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
        over = "" if self.shards is None else f", {self.shards} shards"
        lines = [f"{self.model} ({self.state}{over}): {said or 'nothing to say'}"]
        lines += [f"  {line}" for line in self.units]
        table = plain_table(("verdict", "kind", "where", "what"), [row for f in self.findings for row in _rows(f)])
        lines += ["", *table.rstrip("\n").split("\n")] if self.findings else []
        lines += ["", *(f"  not looked at: {line}" for line in self.not_looked_at)] if self.not_looked_at else []
        return "\n".join(lines)


def _rows(finding: Finding) -> list[tuple[str, str, str, str]]:
    """One row, and others below it for what is too long."""
    said = textwrap.wrap(finding.what, _WIDTH)
    said += textwrap.wrap(finding.to_do, _WIDTH, initial_indent="-> ", subsequent_indent="   ")
    places = _shortened(finding.where)
    count = max(len(said), len(places))
    said += [""] * (count - len(said))
    places += [""] * (count - len(places))
    heads = [(finding.verdict, finding.kind), *[("", "")] * (count - 1)]
    return [(*head, place, text) for head, place, text in zip(heads, places, said, strict=True)]


def _shortened(where: Sequence[str]) -> list[str]:
    """Places, those that differ in numbers in one line: ``layers.*.weight (12)``."""
    counts = by_place(Counter(where))
    lines = [f"{name} ({count})" if count > 1 else name or "the model" for name, count in counts.items()]
    more = len(lines) - _SHOWN_PLACES
    shown = lines if more <= 1 else [*lines[:_SHOWN_PLACES], f"... {more} more"]
    return [part for line in shown for part in textwrap.wrap(line, _WHERE_WIDTH, subsequent_indent="  ") or [""]]


def in_order(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The worst first, else as they came."""
    return tuple(sorted(findings, key=lambda finding: VERDICTS.index(finding.verdict)))
