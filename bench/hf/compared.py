"""What runs on the ranks: one model compiled, beside the same in eager, unsharded and sharded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from bench.hf.models import CASES, DEEP, Batch, Case
from bench.hf.unprepared import case_of
from graphshard.testing.compare import ParityError, Where, compare_named, compare_tensors
from graphshard.testing.parity import check_parity
from graphshard.testing.steps import StepRecord, StepSequence, Trainer
from graphshard.testing.tolerance import Bitwise

STEPS = 3
BITWISE = Bitwise()


@dataclass(frozen=True)
class Outcome:
    """What became of one comparison.

    Attributes:
        problem: the first difference or the error; empty: everything was bitwise equal.
        differs: the two ran, and `problem` is a difference between their numbers.
        breaks: graph breaks.
        report: `graphshard.report` of a sharded model, as text.
        units, regions, programs, outside: numbers of the report; `outside`: of its lines on what ran in eager.
    """

    problem: str = ""
    differs: bool = False
    breaks: int = 0
    report: str = ""
    units: int = 0
    regions: int = 0
    programs: int = 0
    outside: int = 0

    @property
    def bitwise(self) -> bool:
        return not self.problem


def loss_of(output: Any) -> Tensor:
    """What the model says is its loss, or, of one that says none, the mean square of what it predicts."""
    loss: Tensor = output["loss"] if "loss" in output else output["sample"].square().mean()
    return loss


@dataclass(frozen=True)
class Asked:
    """Which models are compared, and how; it travels to the ranks.

    Attributes:
        name: of the case.
        plan, backend: of `graphshard.compile`; `backend` of `torch.compile`, too.
        as_shipped: see `models`.
    """

    name: str
    plan: str
    backend: str
    as_shipped: bool

    @property
    def case(self) -> Case:
        return next((case for case in (*CASES, *DEEP) if case.name == self.name), None) or case_of(self.name)

    def build(self) -> nn.Module:
        return self.case.build(as_shipped=self.as_shipped)

    def inputs(self, index: int, rank: int) -> tuple[tuple[()], Batch]:
        """Of a step and a rank: the same in each run."""
        with torch.random.fork_rng():
            torch.manual_seed((index << 8) + rank)
            return (), self.case.arguments(as_shipped=self.as_shipped)


def unsharded(asked: Asked) -> Outcome | None:
    """Compares `torch.compile` of the plain model with eager, on rank 0."""
    if dist.get_rank() != 0:
        return None
    counters.clear()
    try:
        want, got = _train(asked, compiled=False), _train(asked, compiled=True)
    except Exception as error:  # whatever a model, or Dynamo, raises: the table says it
        return Outcome(told(error))
    breaks = counters["graph_break"].total()
    try:
        _compare(got, want)
    except ParityError as difference:
        return Outcome(str(difference), True, breaks)
    return Outcome(breaks=breaks)


def sharded(asked: Asked) -> Outcome:
    """Compares graphshard with eager FSDP2. An error that is no difference is raised: other ranks may wait."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    built: list[nn.Module] = []

    def build() -> nn.Module:
        built.append(asked.build())
        return built[-1]

    counters.clear()
    problem, differs = "", False
    try:
        check_parity(
            build,
            asked.inputs,
            mesh,
            STEPS,
            backend=asked.backend,
            options={"plan": asked.plan},
            loss=loss_of,
            allow_eager=("",),  # anything: the table says how much it is
        )
    except ParityError as error:
        problem, differs = str(error), True
    report = graphshard.report(built[-1])
    return Outcome(
        problem,
        differs,
        counters["graph_break"].total(),
        str(report),
        len(graphshard.find_units(asked.build())),
        report.regions,
        len(report.programs),
        len(report.eager_unshards) + len(report.eager_reductions) + len(report.fallbacks),
    )


def _train(asked: Asked, *, compiled: bool) -> list[StepRecord]:
    torch.manual_seed(0)
    model = asked.build()
    if compiled:
        model.compile(backend=asked.backend)
    trainer = Trainer(model, StepSequence(asked.inputs, loss_of, steps=STEPS))
    return [trainer.update(trainer.compute(step)) for step in range(STEPS)]


def _compare(records: list[StepRecord], wanted: list[StepRecord]) -> None:
    for step, (got, want) in enumerate(zip(records, wanted, strict=True)):
        for ours, theirs in zip(got.losses, want.losses, strict=True):
            compare_tensors(ours, theirs, tolerance=BITWISE, where=Where("loss", step=step))
        where = Where("gradient", step=step)
        compare_named(got.gradients, want.gradients, tolerance=BITWISE, where=where)


def told(error: Exception) -> str:
    """An error on one line, if it is one."""
    return f"{type(error).__name__}: {error}"
