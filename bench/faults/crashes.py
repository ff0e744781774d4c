"""The crashes: where ranks of the demo's trainer end, how often, and from which step the job has to go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from graphshard.demo.model import ModelConfig
from graphshard.demo.train import MICROBATCHES

# Of each job; a checkpoint after every second step.
STEPS, EVERY = 8, 2
CONFIG = ModelConfig(n_layers=3, dim=64, n_heads=2, hidden_dim=96, max_seq_len=32, dropout=0.1)
RESTARTS = 3
# In the second microbatch of the fifth step; behind it, in the first attempt.
_FIFTH = MICROBATCHES * 4 + 2
Ranks = Literal["odd", "first", "all"]


@dataclass(frozen=True)
class Crash:
    """One way to end.

    Attributes:
        point: where, see `crash_points.POINTS`.
        numbers: the how manieth time that a rank comes there, for each attempt in which it ends.
        goes_on_from: the first step of each attempt after the first.
        ranks: which of them end.
        signal: by which signal.
        ends_launcher: torchrun ends, too; it is started again.
        other_ranks: it is started again in so many times as many ranks, half as many: 0.5.
        backend: of `graphshard.compile`.
        dropout: of the model.
    """

    point: str
    numbers: tuple[int, ...]
    goes_on_from: tuple[int, ...]
    ranks: Ranks = "odd"
    signal: str = "SIGKILL"
    ends_launcher: bool = False
    other_ranks: float = 1.0
    backend: str = "aot_eager"
    dropout: float = 0.1


def _in_step(point: str, number: int) -> Crash:
    return Crash(point, (number,), (4,))


def _in_save(point: str, ranks: Ranks = "first") -> Crash:
    """In that after the fourth step."""
    return Crash(point, (2,), (2,), ranks)


def _in_inductor(point: str, number: int = 1, ranks: Ranks = "odd") -> Crash:
    return Crash(point, (number,), (0,), ranks, backend="inductor")


CRASHES: dict[str, Crash] = {
    "crash in forward, between launches": _in_step("forward", _FIFTH),
    "crash in backward, between launches": _in_step("backward", _FIFTH),
    "crash in the optimizer's step": _in_step("optimizer step", 5),
    "crash of all ranks": Crash("backward", (_FIFTH,), (4,), "all"),
    "crash of all ranks and torchrun": Crash("backward", (_FIFTH,), (4,), "all", ends_launcher=True),
    "crash, and again after the restart": Crash("backward", (_FIFTH, MICROBATCHES * 2 + 1), (4, 6)),
    "crash, then twice as many ranks": Crash("forward", (_FIFTH,), (4,), "all", "SIGKILL", True, 2.0, dropout=0.0),
    "crash, then half as many ranks": Crash("forward", (_FIFTH,), (4,), "all", "SIGKILL", True, 0.5, dropout=0.0),
    "crash with Inductor": Crash("backward", (_FIFTH,), (4,), backend="inductor"),
    "SIGTERM to one rank": Crash("backward", (_FIFTH,), (5,), signal="SIGTERM"),
    "crash before a save": _in_save("before a save", "odd"),
    "crash in a save, in the middle of a file": _in_save("its own file", "odd"),
    "crash in a save, behind a file": _in_save("behind its own file", "odd"),
    "crash in a save, in .metadata": _in_save("metadata"),
    "crash in a save, before the list of files": _in_save("behind its own file"),
    "crash in a save, in the list of files": _in_save("list of files"),
    "crash in a save, before the new name": _in_save("new name"),
    "crash in a save, behind the new name": Crash("behind the new name", (2,), (4,), "first"),
    "crash in a save, in a removal": Crash("removal", (2,), (6,), "first"),
    "crash while Dynamo traces": Crash("tracing", (1,), (0,)),
    "crash while Inductor writes code": _in_inductor("Inductor's code"),
    "crash while the C++ compiler runs": _in_inductor("C++ compiler"),
    "crash of the C++ compiler, too": _in_inductor("compiler's output"),
    "crash in an entry of the plan cache": Crash("plan entry", (2,), (0,), "all"),
    "crash before an entry of the plan cache has its name": Crash("plan entry's name", (2,), (0,), "all"),
    "crash in an entry of Inductor's cache": _in_inductor("Inductor's entry", 2),
}
