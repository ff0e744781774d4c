"""What all parts of one compiled model share."""

from __future__ import annotations

from dataclasses import dataclass

from graphshard.agree.consensus import Consensus
from graphshard.agree.executed import Executed
from graphshard.planning.planning import Planning
from graphshard.reporting.report import Report


@dataclass(frozen=True)
class ModelContext:
    """One compiled model.

    Attributes:
        name: for dumps, errors and the store: the same on every rank.
        report: what happened so far.
        consensus: decisions that all of its ranks share.
        executed: what it has sent, compared between ranks; None: it is not.
        planning: plans its programs; None: they are as in FSDP2.
    """

    name: str
    report: Report
    consensus: Consensus
    executed: Executed | None = None
    planning: Planning | None = None
