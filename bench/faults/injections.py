"""What goes wrong in a job, and when: a class for each fault, with hooks that the job calls on every rank."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

import graphshard
from bench.faults.group import FaultyGroup
from bench.faults.model import FaultyModel

STEPS = 4
# Behind the first steps, in which programs are made.
LATE_STEP = 3
ROWS = 4
OTHER_TORCH = "2.14.1+other"
# Of Dynamo: from then on it runs the code as it is.
RECOMPILE_LIMIT = 8
DELAY_S = 3.0


class Job(Protocol):
    """What an injection sees of the job. `step` counts from 1; 0: before the first."""

    rank: int
    world_size: int
    step: int
    folder: Path
    model: FaultyModel
    group: FaultyGroup | None

    @property
    def is_odd(self) -> bool:
        """Whether this rank is the one on which it goes wrong."""

    def mark(self) -> None:
        """Is told when it goes wrong: of several times and ranks, the first counts."""

    def batch(self) -> torch.Tensor:
        """Of this rank and step."""


class Injection:
    """Nothing goes wrong.

    Attributes:
        steps: of the job.
        wraps: whether the process group is wrapped.
    """

    steps = STEPS
    wraps = False

    def options(self, job: Job) -> dict[str, Any]:
        """More arguments of `graphshard.compile`; before it is called."""
        return {}

    def rows(self, job: Job) -> int:
        """Of the batch of this step."""
        return ROWS

    def before_step(self, job: Job) -> None:
        pass

    def skips(self, job: Job) -> bool:
        """Whether this rank leaves this step out."""
        return False

    def at(self, job: Job, where: str) -> None:
        """In the middle of a forward or backward, or of its compilation."""


class OtherShapes(Injection):
    def rows(self, job: Job) -> int:
        job.mark()
        return ROWS + (2 * job.rank + job.step) % 5


class OtherShapeOnce(Injection):
    def rows(self, job: Job) -> int:
        if job.is_odd and job.step == LATE_STEP:
            job.mark()
            return ROWS + 3
        return ROWS


class GraphBreak(Injection):
    """In one step."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.steps = max(STEPS, step + 2)

    def before_step(self, job: Job) -> None:
        job.model.breaks = job.is_odd and job.step == self._step
        if job.model.breaks:
            job.mark()


class FurtherGraphBreak(GraphBreak):
    """In one step, where the graphs of all ranks break elsewhere in every step."""

    def before_step(self, job: Job) -> None:
        job.model.is_in_parts = True
        super().before_step(job)


class RecompileLimit(Injection):
    """A value that changes in every step, so that Dynamo compiles anew until it no longer does."""

    steps = RECOMPILE_LIMIT + 4

    def before_step(self, job: Job) -> None:
        if job.is_odd:
            job.model.salt = f"step {job.step}"
            if job.step > RECOMPILE_LIMIT:
                job.mark()


class UnsyncedStep(Injection):
    def before_step(self, job: Job) -> None:
        if job.is_odd and job.step in (LATE_STEP, LATE_STEP + 1):
            job.mark()
            job.model.set_requires_gradient_sync(job.step != LATE_STEP)  # type: ignore[operator]


class SkippedStep(Injection):
    def skips(self, job: Job) -> bool:
        if job.is_odd and job.step == LATE_STEP:
            job.mark()
            return True
        return False


class ExtraEvaluation(Injection):
    def before_step(self, job: Job) -> None:
        if job.is_odd and job.step == LATE_STEP:
            job.mark()
            job.model.eval()
            with torch.no_grad():
                job.model(job.batch())
            job.model.train()


class DeadExpert(Injection):
    """From the first step, one rank never reads the last expert."""

    def before_step(self, job: Job) -> None:
        if job.is_odd:
            job.mark()
            job.model.reads_last_expert = False


class StalePlan(Injection):
    """One rank has the plan file of a model that was smaller."""

    def options(self, job: Job) -> dict[str, Any]:
        for width in (FaultyModel.WIDTH, FaultyModel.WIDTH // 2):
            model = graphshard.compile(FaultyModel(width).sharded(None), backend="aot_eager")
            model(torch.ones(ROWS, width)).square().mean().backward()
            graphshard.save_plan(model, self._path(job, width))
        dist.barrier()  # rank 0 writes
        job.mark()
        return {"plan": self._path(job, FaultyModel.WIDTH // 2 if job.is_odd else FaultyModel.WIDTH)}

    def _path(self, job: Job, width: int) -> Path:
        return job.folder / f"plan{width}.json"


class OtherTorch(Injection):
    def options(self, job: Job) -> dict[str, Any]:
        job.mark()
        if job.is_odd:
            torch.__version__ = TorchVersion(OTHER_TORCH)
        return {}


class ColdCache(Injection):
    """The job has run before; one rank finds nothing of it in its compile cache."""

    def before_step(self, job: Job) -> None:
        job.mark()


class OutOfMemory(Injection):
    def __init__(self, where: str) -> None:
        self._where = where

    def at(self, job: Job, where: str) -> None:
        if job.is_odd and where == self._where and job.step == LATE_STEP:
            job.mark()
            raise torch.OutOfMemoryError("injected: no memory left")


class Signal(Injection):
    """In the first step that can be: in compilation, there is no later one."""

    def __init__(self, number: signal.Signals, where: str) -> None:
        self._number, self._where = number, where

    def at(self, job: Job, where: str) -> None:
        if job.is_odd and where == self._where and job.step >= (1 if where == "compilation" else LATE_STEP):
            job.mark()
            os.kill(os.getpid(), self._number)


class Collectives(Injection):
    """What one rank launches is not what it was asked to launch, once."""

    wraps = True

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def before_step(self, job: Job) -> None:
        if job.is_odd and job.step == LATE_STEP:
            assert job.group is not None
            job.group.disturb(self._kind, DELAY_S, job.mark)
