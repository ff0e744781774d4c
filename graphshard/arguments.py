"""What `graphshard.compile` is given: checked before anything is done with it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from graphshard import fsdp2
from graphshard.fsdp2.sharding_arguments import check, refused_devices
from graphshard.runtime.backend import BACKENDS

REGIONS = ("model", "unit")
STRATEGIES = ("fully_shard", "replicate")
# What is shown as it is; of anything else, its type.
_SHOWN = (str, int, float, torch.dtype, type(None))


def check_arguments(model: nn.Module, strategy: str, backend: str, regions: str) -> None:
    """Checks what is one of several words; that there is a module, and a process group.

    Raises:
        TypeError: `model` is no module.
        ValueError: another word.
        RuntimeError: no process group.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"compile: model: got {type(model).__name__}, want an nn.Module")
    for name, got, wanted in (
        ("strategy", strategy, STRATEGIES),
        ("backend", backend, BACKENDS),
        ("regions", regions, REGIONS),
    ):
        if got not in wanted:
            raise ValueError(f"compile: {name}: got {_said(got)}, want one of {', '.join(map(repr, wanted))}")
    if not dist.is_initialized():
        raise RuntimeError(
            "compile: got no process group, want one; call torch.distributed.init_process_group first "
            "(torchrun sets its environment)"
        )


_TYPES: dict[str, Any] = {
    "fullgraph": bool,
    "strict": bool,
    "dynamic": bool | None,
    "mp_policy": MixedPrecisionPolicy | None,
    "offload_policy": OffloadPolicy | None,
    "ignored_params": set | None,
}


def check_types(**arguments: object) -> None:
    """Checks arguments of types that FSDP2 and Dynamo do not check, by name.

    Raises:
        TypeError, ValueError: of another type.
    """
    for name, wanted in _TYPES.items():
        if not isinstance(arguments[name], wanted):
            names = getattr(wanted, "__name__", str(wanted))
            raise TypeError(f"compile: {name}: got {_said(arguments[name])}, want {names}")
    reshard, placement_of = arguments["reshard_after_forward"], arguments["shard_placement_fn"]
    if reshard not in (None, "auto") and not isinstance(reshard, int):  # FSDP2's own errors are ValueErrors
        raise ValueError(f"compile: reshard_after_forward: got {_said(reshard)}, want a bool, an int, 'auto' or None")
    if placement_of is not None and not callable(placement_of):
        raise TypeError(f"compile: shard_placement_fn: got {_said(placement_of)}, want a function of a parameter")
    ignored_params = arguments["ignored_params"]
    for param in ignored_params if isinstance(ignored_params, set) else ():
        if not isinstance(param, nn.Parameter):
            raise TypeError(f"compile: ignored_params: got {_said(param)} in the set, want parameters themselves")


def check_annotated(model: nn.Module, mesh: DeviceMesh | None, strategy: str, sharding: dict[str, Any]) -> None:
    """Checks that arguments do not contradict how a model was annotated. `sharding`: those that shard, by name.

    Raises:
        ValueError: they do.
        UnsupportedModel: it was annotated as no program can be.
    """
    have = fsdp2.annotation_mesh(model)
    check(fsdp2.refused_shards(model))
    if mesh is not None and have is not None and mesh != have:
        raise ValueError(f"compile: mesh: got {mesh}, but the model is annotated with {have}; leave `mesh` out")
    if strategy == "replicate" and any(unit.group_name for unit in fsdp2.sharded_units(model)):
        raise ValueError(
            "compile: strategy: got 'replicate', but fully_shard has sharded the model; annotate it by torch's "
            "replicate, or compile the plain model"
        )
    if given := [name for name, value in sharding.items() if value is not None]:
        raise ValueError(
            f"compile: {given[0]}: the model is annotated already; give it to fully_shard, or compile the plain model"
        )


def check_mesh(model: nn.Module, mesh: DeviceMesh | None) -> DeviceMesh:
    """The mesh to shard a plain model over: `mesh`, or all ranks.

    Raises:
        TypeError: it is none.
        ValueError: it has axes that are not for this, or is for other devices than the model's.
    """
    devices = {param.device.type for param in model.parameters()} - {"meta"}
    if mesh is None:
        kind = next(iter(devices), "cuda" if torch.cuda.is_available() else "cpu")
        mesh = init_device_mesh(kind, (dist.get_world_size(),))
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"compile: mesh: got {type(mesh).__name__}, want a DeviceMesh")
    if mesh.ndim > 2:
        raise ValueError(f"compile: mesh: got {mesh.ndim} axes, want 1 (shard) or 2 (replicate, shard): a sub-mesh")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ValueError("compile: mesh: got 2 axes without names; give init_device_mesh mesh_dim_names")
    check(refused_devices(model, mesh.device_type))
    return mesh


def _said(value: object) -> str:
    """A wrong value, in an error."""
    return f"{value!r:.80}" if isinstance(value, _SHOWN) else type(value).__name__
