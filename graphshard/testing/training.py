"""`training_test`: one training loop, run under eager FSDP2 and under each backend, and compared.

Example::

    @training_test(world_size=2, backends=("aot_eager", "inductor"))
    def test_two_optimizers(run: TrainingRun) -> None:
        model = run.shard(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            loss = model(torch.randn(8, 16)).sum()
            loss.backward()
            run.observe(loss, model)
            optimizer.step()
            optimizer.zero_grad()
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from graphshard.testing.compare import ParityError, Where, compare_named, compare_nested, compare_tensors
from graphshard.testing.evidence import Expected, Launches, check_launches, check_ran_compiled, reported_launches
from graphshard.testing.functions import FunctionName
from graphshard.testing.launches import COLLECTIVES, count_launches
from graphshard.testing.reference import Annotate, shard_compiled, shard_eager
from graphshard.testing.steps import Named, copied, gradients, parameters, place
from graphshard.testing.tolerance import Bitwise, Tolerance
from graphshard.testing.workers import WorkerPool, pool

M = TypeVar("M", bound=nn.Module)

REFERENCE = "reference"


@dataclass(frozen=True)
class Observation:
    """What one `observe` call saw."""

    loss: Tensor
    outputs: object
    gradients: Named
    parameters: Named


@dataclass
class TrainingRun:
    """One pass over the test's body, on one rank.

    Attributes:
        mesh: the mesh of the test's ranks.
        backend: of `graphshard.compile`, or ``"reference"`` in the pass under eager FSDP2.
    """

    mesh: DeviceMesh
    backend: str
    observations: list[Observation] = field(default_factory=list)
    models: list[nn.Module] = field(default_factory=list)
    notes: list[tuple[str, object]] = field(default_factory=list)
    counts: list[tuple[str, Launches]] = field(default_factory=list)

    @property
    def rank(self) -> int:
        """This rank."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size()

    @property
    def is_reference(self) -> bool:
        """Whether this is the pass under eager FSDP2."""
        return self.backend == REFERENCE

    def shard(self, model: M, *, annotate: Annotate | None = None, **options: Any) -> M:
        """Shards a plain model in place: with eager FSDP2 in the reference, with `graphshard.compile` otherwise.

        Args:
            model: the model; it is moved to the mesh's device, as FSDP2 does with its inputs.
            annotate: `annotate(model, mesh)` shards it in both passes, instead of FSDP2's calls on
                `graphshard.find_units`.
            options: of `graphshard.compile`.
        """
        place(model, self.mesh.device_type)
        if self.is_reference:
            shard_eager(model, self.mesh, options, annotate)
        else:
            shard_compiled(model, self.mesh, self.backend, options, annotate)
        self.models.append(model)
        return model

    def observe(self, loss: Tensor, model: nn.Module, outputs: object = None) -> None:
        """Records the loss, the outputs if given, and the model's gradients and parameters as they are now."""
        seen = Observation(copied(loss), copied(outputs), gradients(model), parameters(model))
        self.observations.append(seen)

    def train(
        self,
        model: M,
        optimizer: torch.optim.Optimizer,
        loss_of: Callable[[M, TrainingRun, int], Tensor],
        *,
        steps: int = 3,
        counted: bool = False,
    ) -> None:
        """Trains, and observes each step before the optimizer's.

        Args:
            model: that `shard` returned.
            optimizer: of its parameters.
            loss_of: takes the model, this run and the number of the step.
            steps: how many.
            counted: whether launches are counted, from the second step on.
        """
        for index in range(steps):
            with self.counted(f"step {index}") if counted and index else nullcontext():
                loss = loss_of(model, self, index)
                loss.backward()  # type: ignore[no-untyped-call]
            self.observe(loss, model)
            optimizer.step()
            optimizer.zero_grad()

    def note(self, label: str, value: object) -> None:
        """Records tensors and plain values, in dicts, lists and tuples, that both passes must see alike."""
        self.notes.append((label, copied(value)))

    def note_registration(self, label: str, model: nn.Module) -> None:
        """Records, for each parameter as `named_parameters` yields it now, whether it is a DTensor, its placements and
        its value.
        """
        for name, parameter in model.named_parameters():
            self.note(f"{label}: {name}: {registration(parameter)}", parameter)

    @contextmanager
    def counted(self, label: str) -> Iterator[None]:
        """Counts the launches inside: all-gathers must be at most eager FSDP2's, the others equal."""
        with count_launches() as launches:
            yield
        self.counts.append((label, launches))


def registration(parameter: Tensor) -> str:
    """How a parameter is registered: ``"plain"``, or a DTensor's mesh axes and placements."""
    if not isinstance(parameter, DTensor):
        return "plain"
    axes = parameter.device_mesh.mesh_dim_names or ()
    return f"DTensor {', '.join(map(str, axes))}: {', '.join(map(str, parameter.placements))}"


@dataclass(frozen=True)
class _Settings:
    mesh_shape: tuple[int, ...]
    mesh_axes: tuple[str, ...]
    tolerance: Tolerance
    expect_collectives: Expected
    allow_eager: tuple[str, ...]
    train: bool
    seed: int
    device: str = "cpu"


def training_test(
    world_size: int = 2,
    backends: Sequence[str] = ("aot_eager",),
    *,
    tolerance: Tolerance | None = None,
    mesh_shape: Sequence[int] | None = None,
    mesh_axes: Sequence[str] = ("dp",),
    expect_collectives: Expected = None,
    allow_eager: Sequence[str] = (),
    train: bool = True,
    timeout_s: float = 120.0,
    seed: int = 0,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a pytest test of a training loop, which must observe the same under eager FSDP2 and under a backend.

    The test runs once for each backend. The function's first parameter is its `TrainingRun`; further ones are pytest's
    (fixtures and `parametrize`), and travel to the ranks by pickle.

    Args:
        world_size: number of ranks.
        backends: of `graphshard.compile`.
        tolerance: default: `Bitwise()`.
        mesh_shape: default: one axis of all ranks.
        mesh_axes: the axes' names.
        expect_collectives: compares the launches of the whole loop, which must then do no communication of its own: as
            in `check_parity`.
        allow_eager: as in `check_parity`.
        train: False: forward programs are enough.
        timeout_s: for both passes on the slowest rank.
        seed: of each pass.
    """
    settings = _Settings(
        tuple(mesh_shape or (world_size,)),
        tuple(mesh_axes),
        tolerance or Bitwise(),
        expect_collectives,
        tuple(allow_eager),
        train,
        seed,
    )

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        import pytest  # here: running on ranks needs no pytest

        def test(*, backend: str, **arguments: Any) -> None:
            __tracebackhide__ = True
            name = FunctionName.of(body)
            pool(world_size).run(_compare_passes, name, backend, arguments, settings, timeout_s=timeout_s)

        # No functools.wraps: pytest would look through it and take `run` for a fixture.
        for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(test, attribute, getattr(body, attribute))
        own = list(inspect.signature(body).parameters.values())[1:]
        backend_parameter = inspect.Parameter("backend", inspect.Parameter.KEYWORD_ONLY)
        own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        signature = inspect.Signature([backend_parameter, *own])
        vars(test).update({"__signature__": signature, _BODY: body, _SETTINGS: settings})
        parametrized: Callable[..., None] = pytest.mark.parametrize("backend", list(backends))(test)
        return parametrized

    return decorate


_BODY, _SETTINGS = "training_body", "training_settings"


def rerun(
    test: Callable[..., None], workers: WorkerPool, backend: str, *, timeout_s: float = 300.0, **arguments: Any
) -> None:
    """Runs a `training_test` on other ranks: on another device, by another process group, or another number of them.

    Args:
        test: what `training_test` made.
        workers: the ranks; of a test on a mesh of several axes, as many as it has.
        backend: of `graphshard.compile`.
        timeout_s: for both passes on the slowest rank.
        arguments: of the test's further parameters.

    Raises:
        ValueError: the number of ranks does not fit.
    """
    __tracebackhide__ = True
    settings: _Settings = getattr(test, _SETTINGS)
    if len(settings.mesh_shape) == 1:
        settings = replace(settings, mesh_shape=(workers.world_size,))
    if math.prod(settings.mesh_shape) != workers.world_size:
        raise ValueError(f"rerun: workers: got {workers.world_size} ranks, want a mesh of {settings.mesh_shape}")
    name = FunctionName.of(getattr(test, _BODY))
    settings = replace(settings, device=workers.device)
    workers.run(_compare_passes, name, backend, arguments, settings, timeout_s=timeout_s)


def _compare_passes(name: FunctionName, backend: str, arguments: dict[str, Any], settings: _Settings) -> None:
    """Both passes and their comparison, on one rank."""
    body: Callable[..., None] = getattr(name.load(), _BODY)
    mesh = init_device_mesh(settings.device, settings.mesh_shape, mesh_dim_names=settings.mesh_axes)
    reference, eager_launches = _one_pass(body, TrainingRun(mesh, REFERENCE), arguments, settings)
    run, launches = _one_pass(body, TrainingRun(mesh, backend), arguments, settings)
    _compare_observations(run, reference, settings.tolerance)
    for model in run.models:
        check_ran_compiled(model, train=settings.train, allow_eager=settings.allow_eager)
    check_launches([launches], [eager_launches], settings.expect_collectives)


def _one_pass(
    body: Callable[..., None], run: TrainingRun, arguments: dict[str, Any], settings: _Settings
) -> tuple[TrainingRun, Launches]:
    torch.manual_seed(settings.seed)
    if run.is_reference:
        if settings.expect_collectives is None:  # profilers do not nest: `counted` may want its own
            body(run, **arguments)
            return run, dict.fromkeys(COLLECTIVES, 0)
        with count_launches() as launches:
            body(run, **arguments)
        return run, launches
    body(run, **arguments)
    by_model = [reported_launches(model) for model in run.models]
    return run, {name: sum(counts[name] for counts in by_model) for name in COLLECTIVES}


def _compare_observations(run: TrainingRun, reference: TrainingRun, tolerance: Tolerance) -> None:
    if not run.models:
        raise ParityError("the test never called run.shard(model)")
    if not (reference.observations or reference.notes) or len(run.observations) != len(reference.observations):
        raise ParityError(
            f"run.observe(loss, model): {len(run.observations)} calls under {run.backend!r}, "
            f"{len(reference.observations)} under eager FSDP2; want the same number, at least one"
        )
    for step, (got, want) in enumerate(zip(run.observations, reference.observations, strict=True)):
        compare_tensors(got.loss, want.loss, tolerance=tolerance, where=Where("loss", step=step, rank=run.rank))
        where = Where("output", step=step, rank=run.rank)
        compare_nested(got.outputs, want.outputs, tolerance=tolerance, where=where)
        where = Where("gradient", step=step, rank=run.rank)
        compare_named(got.gradients, want.gradients, tolerance=tolerance, where=where)
        where = Where("parameter", step=step, rank=run.rank)
        compare_named(got.parameters, want.parameters, tolerance=tolerance, where=where)
    labels = [[label for label, _ in kept.notes] for kept in (run, reference)]
    if labels[0] != labels[1]:
        ours, theirs = next(pair for pair in itertools.zip_longest(*labels) if pair[0] != pair[1])
        raise ParityError(
            f"rank {run.rank}: noted {ours!r} under {run.backend!r}, want {theirs!r} as under eager FSDP2"
        )
    for (label, got_value), (_, want_value) in zip(run.notes, reference.notes, strict=True):
        compare_nested(got_value, want_value, tolerance=tolerance, where=Where(label, step=None, rank=run.rank))
    for (label, counted), (its_label, eager) in zip(run.counts, reference.counts, strict=True):
        assert label == its_label
        try:
            check_launches([counted], [eager], "at_most")
        except ParityError as error:
            error.add_note(f"counted: {label}")
            raise
