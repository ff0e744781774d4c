"""The public functions: `compile`, `eager`, `report`, `save_plan`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard

from graphshard import fsdp2
from graphshard.agree.executed import check_compare_every
from graphshard.agree.ranks_alike import post_settings
from graphshard.arguments import check_annotated, check_arguments, check_mesh, check_types
from graphshard.capture import marked_classes
from graphshard.capture.units import resolve_units, said_of_units, units_found
from graphshard.compat.versions import check_torch_version
from graphshard.faults import check_deadline, watch
from graphshard.fsdp2.sharding_arguments import (
    check,
    check_policies,
    check_reshard,
    refused_modules,
    refused_parameters,
    refused_placements,
    refused_policy,
    shard_count,
)
from graphshard.lowering.driver import check_environment, shared_environment
from graphshard.plan_file import Plan, write_plan
from graphshard.planning.options import PLANS, check_plan, make_planning
from graphshard.planning.planned_programs import planned_so_far
from graphshard.reporting.report import Report
from graphshard.runtime.engine import Engine
from graphshard.runtime.entry_points import Options
from graphshard.surroundings import check_accelerate, check_optimizers, note_surroundings, refused_wrappers


def compile(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    strategy: str = "fully_shard",
    units: Sequence[str | type[nn.Module] | nn.Module] | None = None,
    reshard_after_forward: bool | int | Literal["auto"] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    backend: str = "inductor",
    regions: str = "model",
    fullgraph: bool = False,
    dynamic: bool | None = None,
    plan: str | os.PathLike[str] | Plan = "auto",
    memory_budget: int | float | None = None,
    hardware: str | None = None,
    strict: bool = False,
    deadline_s: float | None = None,
    compare_every: int | None = None,
) -> nn.Module:
    """Shards a model in place with FSDP2 and compiles it, collectives included; returns the same object.

    Parameters become DTensors, as with `fully_shard`; FQNs, `state_dict`, optimizers, `clip_grad_norm_`, checkpoints
    and FSDP2's own methods go on working. The model may be on the meta device until its first forward.

    Args:
        model: a plain module, whose units are found from its structure, or one annotated by `fully_shard`, sharded as
            it is.
        mesh: data-parallel mesh, 1-D, or 2-D for hybrid sharding (copies, shards); None for an annotated model, or for
            one axis over all ranks.
        strategy: of a plain model; with ``"replicate"`` parameters are whole on every rank, gradients all-reduced.
        units: FQNs, classes or modules to shard as units, instead of those that `find_units` finds; the
            root is always one.
        reshard_after_forward: frees gathered parameters after forward and gathers them again in backward; an int
            keeps them sharded over that many ranks meanwhile; ``"auto"``: the plan decides for each unit; None: so it
            does for a plain model with ``plan="auto"``, else frees all but the root's. Of an annotated model only
            ``"auto"`` is taken, and decides in the place of its annotation.
        mp_policy: dtypes of gathered parameters, reductions, inputs and outputs.
        offload_policy: as for `fully_shard`.
        shard_placement_fn: as for `fully_shard`.
        ignored_params: parameters that stay as they are, neither sharded nor reduced.
        backend: ``"inductor"``, ``"aot_eager"`` (programs run operator by operator) or ``"eager"`` (no passes either).
        regions: ``"model"`` captures as much as Dynamo can; ``"unit"`` one region per unit, so that equal blocks share
            compiled code.
        fullgraph: makes a graph break an error of Dynamo's.
        dynamic: as for `torch.compile`.
        plan: ``"auto"``: buckets and their places are chosen by simulation; ``"fsdp2"``: one bucket per unit in FSDP2's
            order, prefetched one unit ahead; the path of a ``.json`` file that `save_plan` wrote, or what `load_plan`
            made of it: the plans in it, exactly; a program that it lacks is planned, and noted in the report.
        memory_budget: most that one program may allocate, its arguments included: bytes, or, as a float, a share in
            (0, 1] of a rank's memory; None: as much as FSDP2's plan would, or as a plan file says. Gradients that are
            to stay unreduced are reduced where they would not fit it. Not with ``plan="fsdp2"``.
        hardware: that plans are made for: a name of the hardware table, or the path of a file that
            ``python -m graphshard.calibrate`` wrote; None: that of the device, ``"h100"`` for one that has no row.
        strict: makes an error of calls that would run in eager FSDP2 with a warning.
        deadline_s: most seconds that a launch or wait of a collective may take, before the process ends and says which
            ranks are missing; None: a little less than the process group's time-out.
        compare_every: after so many calls of the model, at the beginning of the next one, ranks compare which
            collectives they have executed since they did last, and wait for each other as long as `deadline_s`, 60 s at
            least; None: never. The model's own collectives, and those of eager FSDP2, are left out.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is no `nn.Module`, or an argument is of another type than those above.
        ValueError: an argument is not one of those above, or contradicts the annotation; a parameter cannot be sharded.
        NotImplementedError: nor can one that is not contiguous, or would be uneven in another dim than 0.
        RuntimeError: torch's version is not supported, no process group is there, or `model` is compiled already.

    Calls of the model raise `PlanMismatch` where a plan that was given is for another program, `BudgetTooSmall` where
    no plan fits `memory_budget`, `UnsupportedModel` where `strict` wants one to run compiled, `RanksDiffer` where ranks
    do not plan alike, or have executed other collectives than each other, and `CommunicationFailed` where a collective
    fails.
    """
    check_torch_version()
    check_arguments(model, strategy, backend, regions)
    check_plan(plan)
    check_deadline(deadline_s)
    check_compare_every(compare_every)
    check_types(
        fullgraph=fullgraph,
        dynamic=dynamic,
        strict=strict,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=shard_placement_fn,
        ignored_params=ignored_params,
    )
    check_environment()
    for compiled, _ in _engines(model):
        raise RuntimeError(
            f"compile: {compiled or 'the model'} is compiled already; compile once, a module around all that share it, "
            "or build it anew"
        )
    options = Options(backend, regions, fullgraph, dynamic, strict, compare_every)
    sharding = {
        "units": units,
        "reshard_after_forward": reshard_after_forward,
        "mp_policy": mp_policy,
        "offload_policy": offload_policy,
        "shard_placement_fn": shard_placement_fn,
        "ignored_params": ignored_params,
    }
    check_policies(mp_policy, offload_policy)
    annotated = fsdp2.is_annotated(model)
    check(refused_wrappers(model))
    check(refused_modules(model))
    auto = reshard_after_forward == "auto"
    if auto and strategy == "fully_shard":
        sharding["reshard_after_forward"] = None
    if annotated:
        check_annotated(model, mesh, strategy, sharding)
        have = fsdp2.annotation_mesh(model)
        kind = "cpu" if have is None else have.device_type
    else:
        if mesh is None:
            check_accelerate()
        mesh = check_mesh(model, mesh)
        kind = mesh.device_type
        check(refused_parameters(model, ignored_params or set()))
        for name, param in model.named_parameters():
            if mp_policy is not None and param not in (ignored_params or ()):
                check(refused_policy(name, param, mp_policy.param_dtype))
        check_optimizers(model)
        if isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool):
            check_reshard(reshard_after_forward, shard_count(mesh))
        if callable(shard_placement_fn) and strategy == "fully_shard":
            named, ignored = model.named_parameters(), ignored_params or set()
            check(refused_placements(named, shard_count(mesh), shard_placement_fn, ignored))
    if auto and plan == "fsdp2":
        raise ValueError("compile: reshard_after_forward: got 'auto' with plan='fsdp2', which decides nothing")
    if regions == "unit" and not (isinstance(plan, str) and plan in PLANS):
        raise ValueError(
            "compile: plan: got a plan file with regions='unit', which gathers between programs: want regions='model', "
            "or plan='auto'"
        )
    keeps = auto or (reshard_after_forward is None and not annotated and strategy == "fully_shard")
    planning = make_planning(plan, memory_budget, hardware, kind, backend == "inductor", keeps)
    said = [] if annotated or mesh is None else _annotate(model, strategy, mesh, sharding)
    engine = model.__dict__[marked_classes.ENGINE] = Engine(model, options, planning)
    engine.context.report.units = said
    note_surroundings(model, annotated, kind if (hardware, plan) == (None, "auto") else "", engine.context.report)
    compares = () if compare_every is None else (f"compare_every {compare_every}",)
    shape = (f"backend {backend}, regions {regions}, strategy {strategy}", shared_environment())
    settings = (*shape, *compares, *planning.settings)
    planning.posts = post_settings(engine.context.name, engine.units, settings)
    watch(engine, engine.context, engine.units, deadline_s)
    return model


def _annotate(model: nn.Module, strategy: str, mesh: DeviceMesh, sharding: dict[str, Any]) -> list[str]:
    """Shards a plain model; returns which units were found, in words."""
    arguments = {name: value for name, value in sharding.items() if value is not None and name != "units"}
    if sharding["units"] is None:
        found = units_found(model)
        modules, said = [*(unit.module for unit in found), model], said_of_units(found)
    else:
        modules, said = [*resolve_units(model, sharding["units"], sharding["ignored_params"] or set()), model], []
    if strategy == "replicate":
        for name in ("reshard_after_forward", "shard_placement_fn"):
            if name in arguments:
                raise ValueError(f"compile: {name}: got a value with strategy='replicate', which shards nothing")
    try:
        for module in modules:
            if strategy == "replicate":
                fsdp2.replicate(module, mesh, arguments)
            else:
                fully_shard(module, mesh=mesh, **arguments)
    except Exception as error:
        if fsdp2.is_annotated(model):
            error.add_note("compile: a part of the model is sharded by now: want another one built for the next try")
        raise
    return said


def engine_of(model: nn.Module) -> Engine | None:
    """The engine that `compile` gave to `model` or to a module inside it, or None."""
    return next((engine for _, engine in _engines(model)), None)


def _engines(model: nn.Module) -> Iterator[tuple[str, Engine]]:
    """All of them, by the names of the modules; ``""``: of `model` itself."""
    for name, module in model.named_modules():
        if isinstance(engine := module.__dict__.get(marked_classes.ENGINE), Engine):
            yield name, engine


def need_engine(model: nn.Module, where: str) -> Engine:
    """The engine of a compiled model.

    Raises:
        TypeError: `model` is no module.
        ValueError: `model` is not compiled.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{where}: got {type(model).__name__}, want a module that graphshard.compile returned")
    engine = engine_of(model)
    if engine is None:
        raise ValueError(f"{where}: got a {type(model).__name__} that is not compiled; call graphshard.compile first")
    return engine


@contextmanager
def eager(model: nn.Module) -> Iterator[nn.Module]:
    """Inside, the same parameters run through FSDP2's own hooks: the fallback, and the reference for parity. Gradients
    that are held unreduced go with them, and come back.

    Args:
        model: compiled by `compile`.

    Raises:
        ValueError: `model` is not compiled.
        RuntimeError: gradients are held that are reduced over shards, but not over their copies.
    """
    with need_engine(model, "graphshard.eager").eager():
        yield model


def weight_backward(model: nn.Module) -> Callable[[], Callable[[], None]]:
    """Splits each backward of a model in two, for schedules that fill bubbles with gradients of weights.

    Torch's own schedules need no such thing. One of your own calls what this returns behind a backward, which has
    computed gradients of inputs only, for a function that does the other half, a program of its own; so does a
    `PipelineStage` that gets it as its `dw_builder`.

    Args:
        model: a stage's module, compiled by `compile`. From now on its backward does half the work.

    Raises:
        ValueError: `model` is not compiled, or it is by ``backend="eager"``, which has no backward programs.
    """
    engine = need_engine(model, "graphshard.weight_backward")
    if engine.options.backend == "eager":
        raise ValueError("graphshard.weight_backward: got a model with backend='eager', want 'aot_eager' or 'inductor'")
    return engine.defer_weights()


def report(model: nn.Module) -> Report:
    """What a compiled model did so far: programs, collectives, and what is not compiled.

    Raises:
        ValueError: `model` is not compiled.
    """
    return need_engine(model, "graphshard.report").context.report


def save_plan(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Writes what a compiled model has planned so far, for ``graphshard.compile(..., plan=path)``.

    Call it on every rank, after the steps whose programs it is to hold: rank 0 writes, and nothing is communicated. The
    file appears at once and whole. Equal plans are equal bytes.

    Args:
        model: compiled by `compile`, with any `plan`.
        path: of the file; its name ends in ``.json``, by which `compile` knows it.

    Raises:
        TypeError: an argument is not one of those above.
        ValueError: `model` is not compiled, or has planned nothing yet; `path` ends otherwise.
        OSError: the file cannot be written.
    """
    where = "graphshard.save_plan"
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{where}: path: got {type(path).__name__}, want the path of a file")
    if not os.fspath(path).endswith(".json"):
        raise ValueError(f"{where}: path: got {os.fspath(path)!r}, want a name that ends in .json")
    engine = need_engine(model, where)
    plan = (
        None
        if engine.context.planning is None
        else planned_so_far(engine.context.planning, engine.context.report, engine.context.name)
    )
    if plan is None or not plan.programs:
        raise ValueError(
            f"{where}: got a model that has planned no program yet; run a step before (what is gathered between "
            "programs, as with regions='unit', is not planned)"
        )
    if dist.get_rank() == 0:
        write_plan(plan, path)
