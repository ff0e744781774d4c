"""What this rank is doing, for those who ask while it hangs.

Programs write it with plain assignments, without a lock: another thread reads it, about once a second.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import CodeType
from typing import Any, NamedTuple

from graphshard.reporting.report import NamedShard, ProgramRecord

# As many program runs as a rank remembers: where ranks ran different programs, the first of them is among these.
REMEMBERED = 16


class Run(NamedTuple):
    """One run of a program.

    Attributes:
        number: how many programs this rank has run, this one included.
        thread: that runs it.
        model: name of the compiled model.
        record: of the program.
        shards: of the parameters it runs for.
    """

    number: int
    thread: int
    model: str
    record: ProgramRecord
    shards: Sequence[NamedShard]


class Activity:
    """What one process is doing.

    Attributes:
        calls: how many programs have begun to run.
        run: the program that runs now.
        recent: (number, model, record) of the last runs, each at its number modulo `REMEMBERED`. No shards: models may
            die.
        compiling: what is being compiled, and since when (of `time.monotonic`, in seconds).
        tracing: whether Dynamo compiles something.
        failure: (number of the run, sentence) of the last collective that failed.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.run: Run | None = None
        self.recent: list[tuple[int, str, ProgramRecord] | None] = [None] * REMEMBERED
        self.compiling: tuple[str, float] | None = None
        self.tracing = False
        self.failure = (0, "")

    def begin(self, thread: int, model: str, record: ProgramRecord, shards: Sequence[Any]) -> None:
        """Notes that a program begins to run."""
        number = self.calls = self.calls + 1
        self.recent[number % REMEMBERED] = (number, model, record)
        self.run = Run(number, thread, model, record, shards)

    def end(self) -> None:
        """Notes that no program runs any more."""
        self.run = None

    def set_compiling(self, what: str) -> None:
        """Notes what is being compiled from now on; empty: nothing."""
        self.compiling = (what, time.monotonic()) if what else None


# Of this process.
activity = Activity()
# What calls programs: frames inside are the program's.
ENTRIES: set[CodeType] = set()


def program_name(model: str, record: ProgramRecord) -> str:
    """A program in words: ``the backward of region 0 of Net0``."""
    if record.region < 0:
        return f"the {record.direction} of one unit of {model}"
    return f"the {record.direction} of region {record.region} of {model}"
