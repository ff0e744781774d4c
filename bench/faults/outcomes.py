"""How the ranks of a job ended, and what is to be said of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, get_args

import torch
from torch import Tensor

from bench.faults.catalog import RANK, Fault
from bench.faults.model import UNIT

# right       all ranks ended well, with the losses and parameters of the reference
# detected    all live ranks ended with an error, and one says which rank, unit or parameter it was
# untold      all live ranks ended with an error, and none says that
# apart       some live ranks ended with an error, some well
# wrong       all ranks ended well, with other losses or parameters, or where there is nothing to compare with
# hang        some live rank was still running at the deadline
# elsewhere   nothing was injected: the job failed before, or never came to where it would have gone wrong
VerdictKind = Literal["right", "detected", "untold", "apart", "wrong", "hang", "elsewhere"]
GOOD: tuple[VerdictKind, ...] = ("right", "detected")

MAX_FRAMES = 12

_PREFIX = re.compile(r"^(?:\[rank\d+\]:\s?)+")
_FRAME = re.compile(r"^(?:\s|Traceback |$)")

Result = tuple[list[Tensor], dict[str, Tensor]]


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended.

    Attributes:
        rank: it.
        status: of its process; None: it was still running at the deadline.
        end_s: when it ended, in seconds since the Epoch.
        stderr: what it said.
        result: its losses, and its part of the parameters.
    """

    rank: int
    status: int | None
    end_s: float
    stderr: str = ""
    result: Result | None = None


@dataclass(frozen=True)
class JobOutcome:
    """One job.

    Attributes:
        odd: the rank on which it went wrong.
        injected_s: when; None: it did not.
        ends: of the ranks, in order.
    """

    odd: int
    injected_s: float | None
    ends: tuple[RankEnd, ...]


@dataclass(frozen=True)
class Verdict:
    """What is to be said of one job.

    Attributes:
        kind: see above.
        seconds: from the injection until the last live rank ended; None: it hung, or nothing was injected.
        names_rank: whether an error of another rank names that on which it went wrong.
        names_unit: whether an error names a unit or parameter.
        said: by rank, what its errors say; of one that hung, also where it stood.
    """

    kind: VerdictKind
    seconds: float | None
    names_rank: bool = False
    names_unit: bool = False
    said: tuple[str, ...] = ()


@dataclass(frozen=True)
class FaultRow:
    """All jobs of one fault and number of ranks.

    Attributes:
        counts: by kind.
        median_s, max_s: to detection; None: nothing was detected.
        rank_named, unit_named: in so many jobs.
    """

    fault: str
    ranks: int
    times: int
    counts: dict[str, int]
    median_s: float | None
    max_s: float | None
    rank_named: int
    unit_named: int


def sentences(stderr: str) -> list[str]:
    """What a rank's errors say: no frames of tracebacks, no warnings."""
    lines = (_PREFIX.sub("", line) for line in stderr.splitlines())
    return [line for line in lines if not _FRAME.match(line) and "Warning" not in line]


def standing(stderr: str) -> list[str]:
    """Where a rank that was asked to stood, the innermost frames."""
    _, asked, frames = stderr.rpartition("Current thread ")
    return [line.strip() for line in frames.splitlines()[1 : 1 + MAX_FRAMES]] if asked else []


def same(got: Sequence[Result], want: Sequence[Result], tolerance: float) -> bool:
    """Whether all ranks have the losses and parts of parameters that they should have."""
    if len(got) != len(want):
        return False
    for (losses, parts), (want_losses, want_parts) in zip(got, want, strict=True):
        if len(losses) != len(want_losses) or parts.keys() != want_parts.keys():
            return False
        pairs = [*zip(losses, want_losses, strict=True), *((part, want_parts[name]) for name, part in parts.items())]
        if not all(_close(ours, theirs, tolerance) for ours, theirs in pairs):
            return False
    return True


def _close(got: Tensor, want: Tensor, tolerance: float) -> bool:
    if tolerance == 0.0:
        return torch.equal(got, want)
    return got.shape == want.shape and torch.allclose(got, want, rtol=tolerance, atol=tolerance)


def judge(fault: Fault, outcome: JobOutcome, reference: Sequence[Result] | None) -> Verdict:
    """What is to be said of a job.

    Args:
        fault: that was injected.
        outcome: how the ranks ended.
        reference: results of the ranks as they should be; None: there are none.
    """
    live = [end for end in outcome.ends if not (fault.kills and end.rank == outcome.odd)]
    said = tuple("\n".join((*sentences(end.stderr), *standing(end.stderr))) for end in outcome.ends)
    if outcome.injected_s is None:
        return Verdict("elsewhere", None, said=said)
    if any(end.status is None for end in live):
        return Verdict("hang", None, said=said)
    seconds = max(end.end_s for end in live) - outcome.injected_s
    failed = [end.status != 0 for end in live]
    if not any(failed):
        results = [end.result for end in outcome.ends if end.result is not None]
        is_right = reference is not None and same(results, reference, fault.tolerance)
        return Verdict("right" if is_right else "wrong", seconds, said=said)
    # That a rank names itself tells nobody whose fault it was.
    own = "" if fault.raises else re.sub(RANK.replace("{rank}", str(outcome.odd)), "", said[outcome.odd])
    told = "\n".join(own if end.rank == outcome.odd else said[end.rank] for end in live)
    if not all(failed):
        kind: VerdictKind = "apart"
    else:
        kind = "detected" if _names(fault.says, told, outcome.odd) else "untold"
    return Verdict(kind, seconds, _names(RANK, told, outcome.odd), _names(UNIT, told, outcome.odd), said)


def _names(pattern: str, text: str, rank: int) -> bool:
    return re.search(pattern.replace("{rank}", str(rank)), text) is not None


def fault_row(fault: str, ranks: int, verdicts: Sequence[Verdict]) -> FaultRow:
    """Counts."""
    counts = {kind: sum(verdict.kind == kind for verdict in verdicts) for kind in get_args(VerdictKind)}
    seconds = [v.seconds for v in verdicts if v.kind == "detected" and v.seconds is not None]
    return FaultRow(
        fault,
        ranks,
        len(verdicts),
        counts,
        median(seconds) if seconds else None,
        max(seconds, default=None),
        sum(v.names_rank for v in verdicts),
        sum(v.names_unit for v in verdicts),
    )
