"""A model as it is to be looked at: which unit owns which parameter, over how many shards, plain or annotated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from graphshard import fsdp2
from graphshard.api import engine_of
from graphshard.capture.units import parameters_of_units, resolve_units, said_of_units, units_found
from graphshard.fsdp2.sharding_arguments import Refusal, has_extension, local_part, shard_count

Mesh = DeviceMesh | int | None


@dataclass(frozen=True)
class OwnedParameter:
    """One parameter.

    Attributes:
        names: all its FQNs.
        param: as users see it: plain, or sharded.
        unit: that owns it, ``""``: the root; None: there is none.
        size: gathered, of one rank's part where it is tensor-parallel.
        dim: that is sharded.
        shards: how many there are; None: not known.
        tensor_parallel: whether it is a DTensor when it is gathered.
        extended: whether its tensor says what is gathered.
    """

    names: tuple[str, ...]
    param: nn.Parameter
    unit: str | None
    size: tuple[int, ...]
    dim: int = 0
    shards: int | None = None
    tensor_parallel: bool = False
    extended: bool = False

    @property
    def name(self) -> str:
        """The first of its FQNs."""
        return self.names[0]

    @property
    def is_uneven(self) -> bool:
        """Whether its shards are not of one size."""
        return bool(self.shards and self.size and self.size[self.dim] % self.shards)


@dataclass
class Subject:
    """A model, and how it is sharded or would be.

    Attributes:
        model: to look at; it stays as it is.
        state: ``"plain"``, ``"annotated"`` or ``"compiled"``.
        shards: ranks that parameters are sharded over; None: not known, or several numbers.
        parameters: in the model's order.
        said: lines about units.
        refusals: of units, where they cannot be as asked.
        lazy: whether some parameters are not initialized yet.
        device_type: of the mesh; ``""``: not known.
    """

    model: nn.Module
    state: str
    shards: int | None
    parameters: list[OwnedParameter]
    said: list[str]
    device_type: str
    refusals: list[Refusal] = field(default_factory=list)
    lazy: bool = False

    def by_unit(self) -> dict[str, list[OwnedParameter]]:
        """The parameters of each unit by its name."""
        found: dict[str, list[OwnedParameter]] = {}
        for owned in self.parameters:
            if owned.unit is not None:
                found.setdefault(owned.unit, []).append(owned)
        return found

    def places(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules with their FQNs, those within TorchScript's left out: they are not Python's."""
        closed: tuple[str, ...] = ()
        for name, module in self.model.named_modules():
            if not (closed and name.startswith(closed)):
                yield name, module
            if isinstance(module, torch.jit.ScriptModule):
                closed += (f"{name}." if name else "",)


def annotated_subject(model: nn.Module) -> Subject:
    """A model that was annotated by `fully_shard` or `replicate`, compiled or not."""
    groups = _names_of(model)
    by_name = {name: names for names in groups.values() for name in names}
    found: dict[tuple[str, ...], OwnedParameter] = {}
    units = fsdp2.sharded_units(model)
    for unit, params in fsdp2.named_units(model, units):
        for fqn, param in params.items():
            names = by_name.get(fqn, (fqn,))
            found[names] = OwnedParameter(
                names,
                param.parameter,
                unit.name,
                param.size,
                param.dim,
                unit.world_size,
                param.layout is not None,
                param.extension(unit.world_size) is not None,
            )
    modules = dict(model.named_modules())
    for registered, names in groups.items():
        if names not in found:
            found[names] = OwnedParameter(names, registered, None, tuple(registered.shape))
    in_order = [found[names] for names in groups.values()]
    counts = {unit.world_size for unit in units}
    mesh = fsdp2.annotation_mesh(model)
    return Subject(
        model,
        "annotated" if engine_of(model) is None else "compiled",
        counts.pop() if len(counts) == 1 else None,
        in_order,
        said_of_names([type(modules[unit.name]).__name__ for unit in units if unit.name in modules and unit.name]),
        "" if mesh is None else mesh.device_type,
    )


def said_of_names(classes: Sequence[str]) -> list[str]:
    """A line about units that users chose."""
    counts = {name: classes.count(name) for name in dict.fromkeys(classes)}
    said = ", ".join(f"{count} {name.removeprefix('FSDP')}" for name, count in counts.items())
    return [f"units beside the root: {said or 'none'}"]


def plain_subject(
    model: nn.Module,
    mesh: Mesh,
    strategy: str,
    units: Sequence[str | type[nn.Module] | nn.Module] | None,
    placement_of: Callable[[nn.Parameter], Any] | None,
    ignored: Set[nn.Parameter],
) -> Subject:
    """A model that `compile` would shard."""
    refusals = list[Refusal]()
    lazy = any(map(_is_lazy, model.parameters()))
    if lazy:
        modules, said = [], ["units: not known before lazy modules have run once"]
    elif units is None:
        found = units_found(model)
        modules, said = [unit.module for unit in found], said_of_units(found)
    else:
        try:
            modules = resolve_units(model, units, ignored)
        except (ValueError, TypeError) as error:
            modules = []
            refusals.append(Refusal("units", "", error))
        said = said_of_names([type(module).__name__ for module in modules])
    if isinstance(mesh, DeviceMesh):
        shards: int | None = shard_count(mesh)
    else:
        shards = mesh if mesh is not None else (dist.get_world_size() if dist.is_initialized() else None)
    shards = 1 if strategy == "replicate" else shards
    names = {module: name for name, module in model.named_modules()}
    unit_of = {
        param: names[module]
        for module, own in zip([*modules, model], parameters_of_units(model, [*modules, model], ignored), strict=True)
        for param in own.values()
    }
    parameters = []
    for param, fqns in _names_of(model).items():
        unit = unit_of.get(param)
        local = local_part(param)
        placement = None if placement_of is None or unit is None or _is_lazy(param) else placement_of(param)
        dim = placement.dim % max(param.ndim, 1) if isinstance(placement, Shard) else 0
        size = () if _is_lazy(param) else tuple(local.shape)
        extended = not _is_lazy(param) and has_extension(param)
        parameters.append(OwnedParameter(fqns, param, unit, size, dim, shards, isinstance(param, DTensor), extended))
    device_type = mesh.device_type if isinstance(mesh, DeviceMesh) else ""
    return Subject(model, "plain", shards, parameters, said, device_type, refusals, lazy)


def _is_lazy(param: nn.Parameter) -> bool:
    return isinstance(param, nn.parameter.UninitializedParameter)


def _names_of(model: nn.Module) -> dict[nn.Parameter, tuple[str, ...]]:
    """All FQNs of each parameter that is registered, without traces of checkpoint wrappers."""
    found: dict[nn.Parameter, tuple[str, ...]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        found[param] = (*found.get(param, ()), fsdp2.without_wrappers(name))
    return found
