"""What went wrong on which rank, told so that the first rank to blame comes first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["died", "raised", "hung", "waiting"]

# A rank that died makes the others raise, one that raised makes the others wait: the cause is told before its effects.
_ORDER: tuple[Kind, ...] = ("died", "raised", "hung", "waiting")
_TOLD: Mapping[Kind, str] = {
    "died": "died",
    "raised": "raised",
    "hung": "was still running at the deadline",
    "waiting": "was still running after another rank had failed",
}


@dataclass(frozen=True)
class RankFailure:
    """How one rank failed.

    Attributes:
        rank: the rank.
        kind: ``"raised"``; ``"died"``: its process ended; ``"hung"``: no answer by the deadline; ``"waiting"``: no
            answer a short while after another rank had failed, most often inside a collective that the failed rank
            never joined.
        error: the exception's last line, or the exit code of the process.
        traceback: traceback of the exception, with the innermost frame's variables under a bare `assert`.
        stack: Python stack of each thread, for a rank that did not answer or died of a signal.
        output: the end of what the rank wrote to stdout and stderr during the task.
    """

    rank: int
    kind: Kind
    error: str = ""
    traceback: str = ""
    stack: str = ""
    output: str = ""

    def __str__(self) -> str:
        lines = [f"--- rank {self.rank} {_TOLD[self.kind]}{f': {self.error}' if self.error else ''}"]
        for title, text in (("", self.traceback), ("stack:", self.stack), ("output:", self.output)):
            if text.strip():
                lines += [title, text.rstrip()] if title else [text.rstrip()]
        return "\n".join(lines)


class RankFailed(AssertionError):
    """A function failed on some rank of a `WorkerPool`.

    Attributes:
        failures: by rank, those to blame first; the ranks that succeeded are left out.
    """

    def __init__(self, task: str, world_size: int, failures: Mapping[int, RankFailure]) -> None:
        ordered = sorted(failures.values(), key=lambda failure: (_ORDER.index(failure.kind), failure.rank))
        self.failures = {failure.rank: failure for failure in ordered}
        to_blame = [failure for failure in ordered if failure.kind == ordered[0].kind]
        ranks = ", ".join(str(failure.rank) for failure in to_blame)
        head = f"{task}: rank {ranks} of {world_size} {_TOLD[to_blame[0].kind]}: {to_blame[0].error or 'see below'}"
        super().__init__("\n\n".join([head, *map(str, ordered)]))
