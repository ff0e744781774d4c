"""What all parts of one compiled model share."""

from __future__ import annotations

from dataclasses import dataclass, field

from graphshard.agree.any_order import AnyOrder
from graphshard.agree.consensus import Consensus
from graphshard.agree.executed import Executed
from graphshard.agree.left_out import LeftOut
from graphshard.planning.planning import Planning
from graphshard.reporting.report import Report


@dataclass(frozen=True)
class ModelContext:
    """One compiled model.

    Attributes:
        name: for dumps, errors and the store: the same on every rank.
        report: what happened so far.
        consensus: decisions that all of its ranks share.
        left_out: which optional passes its ranks leave out of its programs.
        any_order: which of its contracts any order of computation can keep.
        executed: what it has sent, compared between ranks; None: it is not.
        planning: plans its programs; None: they are as in FSDP2.
        strict: whether a pass that fails is an error, though a program is right without it.
    """

    name: str
    report: Report
    consensus: Consensus
    left_out: LeftOut
    executed: Executed | None = None
    planning: Planning | None = None
    strict: bool = False
    any_order: AnyOrder = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "any_order", AnyOrder(self.consensus))
