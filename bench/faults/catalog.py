"""The faults: what goes wrong, what a run that goes on is compared with, and what an error has to say."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from bench.faults.injections import (
    ColdCache,
    Collectives,
    DeadExpert,
    ExtraEvaluation,
    FurtherGraphBreak,
    GraphBreak,
    Injection,
    OtherShapeOnce,
    OtherShapes,
    OtherTorch,
    OutOfMemory,
    RecompileLimit,
    Signal,
    SkippedStep,
    StalePlan,
    UnsyncedStep,
)
from bench.faults.model import UNIT

# In an error, "{rank}" is the rank on which it went wrong.
RANK = r"\b[Rr]anks? (?:\d+, )*{rank}\b"
RANK_OR_UNIT = f"{RANK}|{UNIT}"

# What losses and parameters are compared with: eager FSDP2 with the same fault, or with none; a model that is not
# sharded; nothing: eager FSDP2 cannot run it either, and no result is right.
Reference = Literal["fsdp2", "fsdp2, healthy", "unsharded", "none"]


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        injection: makes it go wrong.
        says: a pattern, of which some error has to have a match.
        reference: what a run that ends well is compared with.
        tolerance: relative, of that comparison; 0: bitwise.
        backend: of `graphshard.compile`, in place of the bench's.
        kills: the rank on which it goes wrong is not asked how it ends.
        raises: that rank has an error of its own, in which it need not name itself: the others' have to.
        warm: the same job has run before, on all ranks but that one, with the same compile caches.
        compiles_s: more seconds until it is a hang: Inductor compiles behind the injection.
    """

    injection: Injection
    says: str = RANK
    reference: Reference = "none"
    tolerance: float = 0.0
    backend: str = ""
    kills: bool = False
    raises: bool = False
    warm: bool = False
    compiles_s: float = 0.0


def _killed(number: signal.Signals, where: str) -> Fault:
    return Fault(Signal(number, where), kills=True)


FAULTS: dict[str, Fault] = {
    "other shapes on each rank": Fault(OtherShapes(), RANK_OR_UNIT, "fsdp2"),
    "another shape on one rank, once": Fault(OtherShapeOnce(), RANK_OR_UNIT, "fsdp2"),
    "graph break in step 1": Fault(GraphBreak(1), RANK_OR_UNIT, "fsdp2, healthy"),
    "graph break in step 3": Fault(GraphBreak(3), RANK_OR_UNIT, "fsdp2, healthy"),
    "graph break in step 50": Fault(GraphBreak(50), RANK_OR_UNIT, "fsdp2, healthy"),
    "further graph break": Fault(FurtherGraphBreak(3), RANK_OR_UNIT, "fsdp2, healthy"),
    "recompile limit": Fault(RecompileLimit(), RANK_OR_UNIT, "fsdp2, healthy"),
    "gradients not synchronized": Fault(UnsyncedStep(), RANK_OR_UNIT),
    "skipped step": Fault(SkippedStep(), RANK_OR_UNIT),
    "extra evaluation": Fault(ExtraEvaluation(), RANK_OR_UNIT),
    "dead expert": Fault(DeadExpert(), RANK_OR_UNIT, "unsharded", 1e-5),
    "stale plan file": Fault(StalePlan(), RANK, "fsdp2, healthy", 1e-5),
    "another torch version": Fault(OtherTorch(), RANK, "fsdp2, healthy"),
    "cold compile cache": Fault(
        ColdCache(), RANK_OR_UNIT, "fsdp2, healthy", 1e-5, "inductor", warm=True, compiles_s=120.0
    ),
    "out of memory in forward": Fault(OutOfMemory("forward"), raises=True),
    "out of memory in backward": Fault(OutOfMemory("backward"), raises=True),
    "SIGKILL in forward": _killed(signal.SIGKILL, "forward"),
    "SIGKILL in backward": _killed(signal.SIGKILL, "backward"),
    "SIGKILL in compilation": _killed(signal.SIGKILL, "compilation"),
    "SIGSTOP in forward": _killed(signal.SIGSTOP, "forward"),
    "SIGSTOP in backward": _killed(signal.SIGSTOP, "backward"),
    "SIGSTOP in compilation": _killed(signal.SIGSTOP, "compilation"),
    "dropped collective": Fault(Collectives("dropped"), RANK_OR_UNIT, "fsdp2, healthy"),
    "delayed collective": Fault(Collectives("delayed"), RANK_OR_UNIT, "fsdp2, healthy"),
    "duplicated collective": Fault(Collectives("duplicated"), RANK_OR_UNIT, "fsdp2, healthy"),
    "reordered collectives": Fault(Collectives("reordered"), RANK_OR_UNIT, "fsdp2, healthy"),
}
