"""`graphshard.doctor`: what of a model is handled specially, runs in eager, has no effect, or is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from graphshard import fsdp2
from graphshard.api import engine_of
from graphshard.arguments import STRATEGIES
from graphshard.examining.diagnosis import Diagnosis, Finding, in_order
from graphshard.examining.forward import ForwardLook
from graphshard.examining.modules import module_findings, shared_findings
from graphshard.examining.parameters import parameter_findings, refusal_findings
from graphshard.examining.subject import Mesh, Subject, annotated_subject, plain_subject
from graphshard.fsdp2.sharding_arguments import (
    Refusal,
    refused_devices,
    refused_modules,
    refused_parameters,
    refused_placements,
)
from graphshard.surroundings import refused_wrappers

_QUOTED = re.compile("'([^']*)'")


def doctor(
    model: nn.Module,
    mesh: Mesh = None,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    strategy: str = "fully_shard",
    units: Sequence[str | type[nn.Module] | nn.Module] | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    ignored_params: set[nn.Parameter] | None = None,
) -> Diagnosis:
    """Looks at a model before it is compiled, or behind: what `compile` does with all that is special about it.

    It may be called on one rank alone, and without a process group. The model stays as it is, and so does the state of
    random number generators: a forward is looked at on a copy without data, once in eager and once under Dynamo, which
    takes seconds and no memory. What the code of a forward changes outside its model, it changes twice.

    Args:
        model: plain, annotated by `fully_shard` or `replicate`, or compiled.
        mesh: as of `compile`, or the number of ranks that parameters are sharded over, where there is no mesh yet;
            None: all ranks, or those of the annotation.
        args: sample arguments of the model's forward, for parameters that it does not read and for graph breaks; None,
            with `kwargs` None: neither is looked for.
        kwargs: sample keyword arguments, likewise.
        strategy: as of `compile`, for a plain model.
        units: likewise.
        shard_placement_fn: likewise.
        ignored_params: likewise.

    Returns:
        What was found: print it, or read its `findings`.

    Raises:
        TypeError: an argument is not one of those above.
        ValueError: an argument contradicts the annotation, or is not one of those above.
    """
    _check(model, mesh, args, kwargs, strategy)
    ignored = ignored_params or set()
    if fsdp2.is_annotated(model):
        given = {"units": units, "shard_placement_fn": shard_placement_fn, "ignored_params": ignored_params}
        if names := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"doctor: {names[0]}: the model is annotated already; leave it out")
        subject = annotated_subject(model)
    else:
        placement_of = shard_placement_fn if strategy == "fully_shard" else None
        subject = plain_subject(model, mesh, strategy, units, placement_of, ignored)
        subject.refusals += _refusals(subject, placement_of, ignored)
    name = fsdp2.own_class(type(model)).__name__.removeprefix("FSDP").removeprefix("Replicate")
    if wrappers := list(refusal_findings(refused_wrappers(model))):
        left = ["all else: want the model without what is around it"]
        return Diagnosis(name, subject.state, subject.shards, tuple(subject.said), in_order(wrappers), tuple(left))
    findings = [*refusal_findings(iter(subject.refusals)), *parameter_findings(subject), *module_findings(subject)]
    findings += refusal_findings(refused_modules(model))
    if subject.state == "plain":
        findings += shared_findings(subject) if units is None and not subject.lazy else []
    else:
        findings += refusal_findings(fsdp2.refused_shards(model))
    findings += _ran(model)
    left = list(_left_out(subject, args is None and kwargs is None))
    if args is not None or kwargs is not None:
        if subject.lazy:
            left.append("unused parameters and graph breaks: parameters are not initialized yet")
        else:
            look = ForwardLook(subject, args or (), kwargs or {})
            findings += look.findings
            left += look.not_looked_at
    return Diagnosis(name, subject.state, subject.shards, tuple(subject.said), in_order(findings), tuple(left))


def _check(model: Any, mesh: Any, args: Any, kwargs: Any, strategy: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"doctor: model: got {type(model).__name__}, want an nn.Module")
    if isinstance(mesh, bool) or not isinstance(mesh, DeviceMesh | int | None):
        raise TypeError(f"doctor: mesh: got {type(mesh).__name__}, want a DeviceMesh, a number of ranks or None")
    if isinstance(mesh, int) and mesh < 1:
        raise ValueError(f"doctor: mesh: got {mesh} ranks, want at least 1")
    if isinstance(args, torch.Tensor | str) or not isinstance(args, Sequence | None):
        raise TypeError(f"doctor: args: got {type(args).__name__}, want a tuple of arguments")
    if not isinstance(kwargs, Mapping | None):
        raise TypeError(f"doctor: kwargs: got {type(kwargs).__name__}, want a dict")
    if strategy not in STRATEGIES:
        raise ValueError(f"doctor: strategy: got {strategy!r}, want one of {', '.join(map(repr, STRATEGIES))}")


def _refusals(
    subject: Subject, placement_of: Callable[[nn.Parameter], Any] | None, ignored: set[nn.Parameter]
) -> Iterator[Refusal]:
    """What `compile` checks, all of it."""
    yield from refused_parameters(subject.model, ignored)
    if subject.device_type:
        yield from refused_devices(subject.model, subject.device_type)
    if placement_of is not None and subject.shards is not None:
        named = ((owned.name, owned.param) for owned in subject.parameters)
        yield from refused_placements(named, subject.shards, placement_of, ignored)


def _ran(model: nn.Module) -> Iterator[Finding]:
    """What a compiled model has said so far."""
    if (engine := engine_of(model)) is not None:
        report = engine.context.report
        for lines, verdict in ((report.fallbacks, "eager"), (report.notes, "handled")):
            alike: dict[str, list[str]] = {}
            for line in lines:
                alike.setdefault(_QUOTED.sub("", line, count=1), []).append(line)
            for same in alike.values():  # a line for each unit
                names = tuple(match[1] for line in same if (match := _QUOTED.search(line)))
                yield Finding("said by the run", names, same[0], verdict)


def _left_out(subject: Subject, no_inputs: bool) -> Iterator[str]:
    if subject.state == "plain" and subject.shards is None:
        yield "uneven parameters: want a mesh, or a number of ranks"
    if no_inputs:
        yield "unused parameters and graph breaks: want sample arguments of forward, args=(...) or kwargs={...}"
