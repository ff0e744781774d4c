"""A compiled model against eager FSDP2: the same losses, outputs, gradients, parameters and launches, step by step.

`check_parity` is called on every rank, inside a function that a `WorkerPool` runs. The model is built twice from one
seed; one copy runs under eager FSDP2 with the same units, the other under graphshard. A run that fell back to eager
would agree with eager: the programs must therefore have been built and run, and nothing may have happened outside them
unless the caller names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from graphshard.testing.compare import ParityError, Where, compare_named, compare_nested, compare_tensors
from graphshard.testing.evidence import (
    Expected,
    Launches,
    check_launches,
    check_measured,
    check_ran_compiled,
    reported_launches,
)
from graphshard.testing.launches import count_launches
from graphshard.testing.reference import Annotate, shard_compiled, shard_eager
from graphshard.testing.steps import (
    Inputs,
    Loss,
    MakeOptimizer,
    StepRecord,
    StepSequence,
    Trainer,
    buffers,
    default_loss,
    default_optimizer,
    parameters,
    place,
)
from graphshard.testing.tolerance import Bitwise, Tolerance

Options = Mapping[str, Any] | Callable[[nn.Module], Mapping[str, Any]]


@dataclass
class ParityResult:
    """What a run that agreed was like, on this rank. It holds the models: return parts of it from a worker.

    Attributes:
        model: the compiled model, after the last step.
        reference: the eager one.
        losses: of each step, its microbatches summed.
        launches: of the compiled model by step, as graphshard reports them.
        eager_launches: of the eager one by step, as the profiler saw them.
        max_ulp: the largest distance of two elements that the tolerance accepted.
    """

    model: nn.Module
    reference: nn.Module
    losses: list[float]
    launches: list[Launches]
    eager_launches: list[Launches]
    max_ulp: int


def check_parity(
    build: Callable[[], nn.Module],
    inputs: Inputs,
    mesh: DeviceMesh,
    steps: int = 3,
    *,
    backend: str = "aot_eager",
    options: Options | None = None,
    annotate: Annotate | None = None,
    loss: Loss = default_loss,
    optimizer: MakeOptimizer = default_optimizer,
    microbatches: int = 1,
    sync: Literal["last", "every"] = "last",
    train: bool = True,
    tolerance: Tolerance | None = None,
    expect_collectives: Expected = "at_most",
    allow_eager: Sequence[str] = (),
    seed: int = 0,
) -> ParityResult:
    """Trains a model under eager FSDP2 and under graphshard and compares everything.

    Args:
        build: makes the plain model; called twice, each time after `torch.manual_seed(seed)`.
        inputs: `inputs(index, rank)`: positional arguments, or (args, kwargs), of microbatch `index`, counted from 0
            over all steps; tensors are moved to the mesh's device.
        mesh: the mesh; the models are moved to its device.
        steps: optimizer steps.
        backend: of `graphshard.compile`.
        options: further options of `graphshard.compile`, or a function of the model for those that hold its modules.
        annotate: shards both models, instead of `fully_shard` on `graphshard.find_units(model)`.
        loss: of an output.
        optimizer: made from the parameters.
        microbatches: forwards and backwards per optimizer step.
        sync: with microbatches, reduce gradients in the ``"last"`` backward or in ``"every"`` one.
        train: False: forwards only, under `torch.no_grad()`.
        tolerance: default: `Bitwise()`.
        expect_collectives: ``"equal"``: as many of each as eager; ``"at_most"``: all-gathers may be fewer; None: not
            compared. Plans other than FSDP2's (`options`) have other collectives: then they are not either.
        allow_eager: what may run outside programs: a part of each such FQN or line of `report(model).fallbacks`.
        seed: of the model and of the random numbers of each forward.

    Raises:
        ParityError: on the first difference, or if the model did not really run compiled.
    """
    sequence = StepSequence(inputs, loss, optimizer, steps, microbatches, sync, train, seed, mesh.device_type)

    def built() -> tuple[nn.Module, Mapping[str, Any]]:
        torch.manual_seed(seed)
        model = place(build(), mesh.device_type)
        return model, options(model) if callable(options) else options or {}

    reference, its_options = built()
    shard_eager(reference, mesh, its_options, annotate)
    model, its_options = built()
    shard_compiled(model, mesh, backend, its_options, annotate)
    comparison = _Comparison(tolerance or Bitwise(), dist.get_rank())
    before = parameters(reference)
    comparison.named("initial parameter", parameters(model), before)
    comparison.named("initial buffer", buffers(model), buffers(reference))

    wanted, eager_launches = _run_eager(reference, sequence)
    records, launches, measured = _run_compiled(model, sequence)
    for step, (got, want) in enumerate(zip(records, wanted, strict=True)):
        comparison.step(got, want, step)
    check_ran_compiled(model, train=train, allow_eager=allow_eager)
    check_measured(launches, measured)
    planned = its_options.get("plan", "fsdp2") != "fsdp2"
    check_launches(launches, eager_launches, None if planned else expect_collectives)
    if train:
        _check_moved(before, wanted[-1])
    losses = [float(sum(loss.item() for loss in record.losses)) for record in records]
    return ParityResult(model, reference, losses, launches, eager_launches, comparison.max_ulp)


def _run_eager(model: nn.Module, sequence: StepSequence) -> tuple[list[StepRecord], list[Launches]]:
    trainer, records, launches = Trainer(model, sequence), [], []
    for step in range(sequence.steps):
        with count_launches() as counted:
            record = trainer.compute(step)
        records.append(trainer.update(record))
        launches.append(counted)
    return records, launches


def _run_compiled(
    model: nn.Module, sequence: StepSequence
) -> tuple[list[StepRecord], list[Launches], list[Launches | None]]:
    """Records, launches by report, and launches by profiler (None: not measured) of each step."""
    trainer = Trainer(model, sequence)
    records: list[StepRecord] = []
    reported: list[Launches] = []
    measured: list[Launches | None] = []
    for step in range(sequence.steps):
        before = reported_launches(model)
        if step == 0:  # compiles: the profiler would see a hundred thousand fake operators
            record = trainer.compute(step)
            measured.append(None)
        else:
            with count_launches() as counted:
                record = trainer.compute(step)
            measured.append(counted)
        after = reported_launches(model)
        reported.append({name: after[name] - before[name] for name in after})
        records.append(trainer.update(record))
    return records, reported, measured


class _Comparison:
    """Compares parts in the order in which a step computes them: the first difference is nearest to its cause."""

    def __init__(self, tolerance: Tolerance, rank: int) -> None:
        self.max_ulp = 0
        self._tolerance = tolerance
        self._rank = rank

    def named(self, what: str, got: Mapping[str, Any], want: Mapping[str, Any], step: int | None = None) -> None:
        where = Where(what, step=step, rank=self._rank)
        self._saw(compare_named(got, want, tolerance=self._tolerance, where=where))

    def step(self, got: StepRecord, want: StepRecord, step: int) -> None:
        where = Where("output", step=step, rank=self._rank)
        self._saw(compare_nested(got.outputs, want.outputs, tolerance=self._tolerance, where=where))
        for ours, theirs in zip(got.losses, want.losses, strict=True):
            where = Where("loss", step=step, rank=self._rank)
            self._saw(compare_tensors(ours, theirs, tolerance=self._tolerance, where=where))
        self.named("gradient", got.gradients, want.gradients, step)
        self.named("parameter", got.parameters, want.parameters, step)
        self.named("buffer", got.buffers, want.buffers, step)

    def _saw(self, ulp: int) -> None:
        self.max_ulp = max(self.max_ulp, ulp)


def _check_moved(before: Mapping[str, Any], last: StepRecord) -> None:
    """A test whose parameters stay where they were cannot see a wrong gradient."""
    for name, parameter in last.parameters.items():
        if parameter is not None and not torch.equal(_local(parameter), _local(before[name])):
            return
    raise ParityError("no parameter moved in the reference: this test cannot fail; look at its optimizer and its loss")


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
