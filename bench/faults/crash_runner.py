"""Runs the demo's trainer under torchrun with a crash in it, and reads what became of it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import keystr, tree_flatten_with_path

from bench.faults.crash_worker import CrashSpec
from bench.faults.crashes import CRASHES, RESTARTS, STEPS, Crash
from bench.faults.outcomes import Verdict, VerdictKind
from graphshard.demo.restartable import OTHER_RANKS
from graphshard.testing.environment import worker_environment

JOB_S = 300.0
# torchrun's own grace for its ranks is 30 s.
SHUTDOWN_S = 40.0


@dataclass(frozen=True)
class LossLine:
    """What rank 0 noted of a step: in which torchrun and attempt, from which step on, the loss and gradient norm."""

    launch: int
    attempt: int
    first: int
    step: int
    loss: float
    grad_norm: float


@dataclass(frozen=True)
class CrashOutcome:
    """One job.

    Attributes:
        statuses: of each torchrun; None: it hung.
        crashed: when ranks ended, in seconds since the Epoch.
        end_s: when the last torchrun ended.
        lines: of all attempts, in the order in which they were noted.
        final: a digest of what the last checkpoint holds; empty: it is not there.
        left: what else is in the folder of checkpoints.
        said: the trainer's and torchrun's words.
    """

    statuses: tuple[int | None, ...]
    crashed: tuple[float, ...]
    end_s: float
    lines: tuple[LossLine, ...]
    final: str
    left: tuple[str, ...]
    said: str

    @property
    def began(self) -> list[int]:
        """The first step of each attempt that made one."""
        first = {(line.launch, line.attempt): line.first for line in self.lines}
        return [first[attempt] for attempt in sorted(first)]

    @property
    def passed_over(self) -> list[str]:
        """What was said of checkpoints that were not loaded."""
        return [line for line in self.said.splitlines() if " is passed over: " in line]


@dataclass(frozen=True)
class CrashRow:
    """One job as a line of the table.

    Attributes:
        kind: of the verdict.
        seconds: from the crash to the end of the job, which makes the missing steps.
        began: from which step on it went on, after each crash.
        difference: largest of a loss, relative, from that of the same step without a crash.
        passed_over: so many checkpoints.
    """

    crash: str
    ranks: int
    kind: str
    seconds: float | None
    began: tuple[int, ...]
    difference: float
    passed_over: int


@dataclass
class CrashRunner:
    """Runs jobs.

    Attributes:
        job_s: most seconds of one torchrun; then it was a hang.
    """

    job_s: float = JOB_S

    def __post_init__(self) -> None:
        self._references: dict[tuple[str, float, int], CrashOutcome] = {}

    def verdict(self, name: str, world_size: int) -> tuple[Verdict, CrashRow]:
        """Runs one job, and the same without the crash, once for all jobs."""
        crash = CRASHES[name]
        key = (crash.backend, crash.dropout, world_size)
        if key not in self._references:
            self._references[key] = self.run(None, *key)
        outcome = self.run(crash, *key)
        verdict = judge_crash(crash, outcome, self._references[key])
        row = CrashRow(
            name,
            world_size,
            verdict.kind,
            verdict.seconds,
            tuple(outcome.began[-len(crash.goes_on_from) :]),
            largest_difference(outcome.lines, self._references[key].lines),
            len(outcome.passed_over),
        )
        return verdict, row

    def run(self, crash: Crash | None, backend: str, dropout: float, world_size: int) -> CrashOutcome:
        """One job; None: without a crash."""
        launches = [world_size]
        if crash is not None and crash.ends_launcher:
            launches.append(int(world_size * crash.other_ranks))
        with tempfile.TemporaryDirectory(prefix="graphshard-crashes-") as path:
            folder = Path(path)
            statuses = []
            for launch, ranks in enumerate(launches):
                CrashSpec(crash, backend, dropout, launch).write(folder)
                statuses.append(self._launch(folder, ranks, launch))
            return _outcome(folder, statuses)

    def _launch(self, folder: Path, ranks: int, launch: int) -> int | None:
        options = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(RESTARTS)]
        variables = {
            **worker_environment(),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "caches"),
            "GRAPHSHARD_FAULTS": str(folder / "faults"),
        }
        with (folder / f"said{launch}").open("wb") as said:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    *options,
                    "-m",
                    "bench.faults.crash_worker",
                    str(folder),
                ],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )
            try:
                return process.wait(self.job_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                _end(process)


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """Ends a torchrun, if it still runs: it ends its ranks first."""
    launcher.terminate()
    try:
        launcher.wait(SHUTDOWN_S)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()


def _outcome(folder: Path, statuses: Sequence[int | None]) -> CrashOutcome:
    checkpoints = folder / "checkpoints"
    last = checkpoints / f"step-{STEPS:08d}"
    complete = {path.name for path in checkpoints.glob("step-????????")} if checkpoints.exists() else set()
    left = [path.name for path in checkpoints.iterdir() if path.name not in complete] if checkpoints.exists() else []
    return CrashOutcome(
        tuple(statuses),
        tuple(float(path.read_text()) for path in sorted(folder.glob("crashed*"))),
        time.time(),
        tuple(line for launch in range(len(statuses)) for line in read_losses(folder / f"losses{launch}", launch)),
        digest(last, folder / "whole.pt") if last.exists() else "",
        tuple(left),
        "".join((folder / f"said{launch}").read_text(errors="replace") for launch in range(len(statuses))),
    )


def digest(checkpoint: Path, whole: Path) -> str:
    """Of all that a checkpoint holds, whatever the files. `whole`: a file for it."""
    dcp_to_torch_save(checkpoint, whole)
    found, _ = tree_flatten_with_path(torch.load(whole))
    described = sorted(
        f"{keystr(path)}: {value.dtype} {tuple(value.shape)} {hashlib.sha256(value.numpy().tobytes()).hexdigest()}"
        if isinstance(value, torch.Tensor)
        else f"{keystr(path)}: {value!r}"
        for path, value in found
    )
    return hashlib.sha256("\n".join(described).encode()).hexdigest()


def read_losses(file: Path, launch: int) -> list[LossLine]:
    """The lines of a torchrun; one that a crash has cut off is none."""
    lines = []
    for text in file.read_text().splitlines() if file.exists() else ():
        try:
            lines.append(LossLine(launch, **json.loads(text)))
        except ValueError:
            continue
    return lines


def largest_difference(lines: Sequence[LossLine], want: Sequence[LossLine]) -> float:
    """The largest relative difference of a loss from that of the same step."""
    losses = {line.step: line.loss for line in want}
    differences = (
        abs(line.loss - losses[line.step]) / abs(losses[line.step]) if line.step in losses else math.inf
        for line in lines
    )
    return max(differences, default=0.0)


def judge_crash(crash: Crash, outcome: CrashOutcome, reference: CrashOutcome) -> Verdict:
    """What is to be said of a job.

    Args:
        crash: that happened.
        outcome: what became of it.
        reference: the same without a crash, in as many ranks.
    """
    said = (outcome.said,)
    if any(status is None for status in outcome.statuses):
        return Verdict("hang", None, said=said)
    if len(outcome.crashed) < len(crash.numbers):
        return Verdict("elsewhere", None, said=said)
    seconds = outcome.end_s - outcome.crashed[0]
    if outcome.statuses[-1] != 0:
        return Verdict("untold", seconds, said=said)
    kind: VerdictKind = "right" if not (wrong := complaints(crash, outcome, reference)) else "wrong"
    return Verdict(kind, seconds, said=(*wrong, *said))


def complaints(crash: Crash, outcome: CrashOutcome, reference: CrashOutcome) -> list[str]:
    """What is wrong with a job that has ended well."""
    found = []
    # Where the first attempt ended before its first step, there is no line of it.
    began, want = outcome.began[-len(crash.goes_on_from) :], list(crash.goes_on_from)
    if began != want:
        found.append(f"it went on from steps {began}, want {want}")
    if {line.step for line in outcome.lines} != set(range(1, STEPS + 1)):
        found.append("steps are missing")
    alike = [replace(line, launch=0, attempt=0, first=0) for line in outcome.lines if line.launch == 0]
    wanted = {replace(line, launch=0, attempt=0, first=0) for line in reference.lines}
    if not wanted.issuperset(alike):
        found.append("losses or gradient norms differ from those without a crash")
    others = [line for line in outcome.lines if line.launch]
    if crash.other_ranks == 1.0:
        if not wanted.issuperset(replace(line, launch=0, attempt=0, first=0) for line in others):
            found.append("losses or gradient norms differ after torchrun was started again")
        if not outcome.final or outcome.final != reference.final:
            found.append("the last checkpoint differs from that without a crash")
    elif (difference := largest_difference(others, reference.lines)) > OTHER_RANKS:
        found.append(f"losses differ by {difference:.0e}, want at most {OTHER_RANKS:.0e}, relative")
    if outcome.left:
        found.append(f"left in the folder of checkpoints: {', '.join(outcome.left)}")
    return found
