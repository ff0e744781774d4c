"""The model under eager FSDP2, in the units that graphshard would make: what a compiled model is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import graphshard
from graphshard import fsdp2
from graphshard.capture.units import resolve_units

Annotate = Callable[[nn.Module, DeviceMesh], object]

# Options of graphshard.compile that are fully_shard's own.
_FULLY_SHARD = (
    "reshard_after_forward",
    "mp_policy",
    "offload_policy",
    "shard_placement_fn",
    "ignored_params",
)


def shard_eager(model: nn.Module, mesh: DeviceMesh, options: Mapping[str, Any], annotate: Annotate | None) -> None:
    """Shards `model` in place with eager FSDP2.

    Args:
        model: a plain model.
        mesh: the mesh.
        options: those of `graphshard.compile`; what is not about sharding is left out.
        annotate: shards the model instead, if given.

    """
    if annotate is not None:
        annotate(model, mesh)
        return
    kwargs = {name: options[name] for name in _FULLY_SHARD if options.get(name) is not None}
    for unit in [*resolve_units(model, options.get("units"), options.get("ignored_params") or set()), model]:
        if options.get("strategy") == "replicate":
            fsdp2.replicate(unit, mesh, kwargs)
        else:
            fully_shard(unit, mesh=mesh, **kwargs)


def shard_compiled(
    model: nn.Module, mesh: DeviceMesh, backend: str, options: Mapping[str, Any], annotate: Annotate | None
) -> None:
    """Shards and compiles `model` in place with graphshard: the other side of `shard_eager`.

    As eager does, one collective per unit, unless `options` say otherwise.
    """
    options = {"plan": "fsdp2", **options}
    if annotate is None:
        compiled = graphshard.compile(model, mesh, backend=backend, **options)
    else:
        annotate(model, mesh)
        compiled = graphshard.compile(model, backend=backend, **options)
    if compiled is not model:
        raise AssertionError("graphshard.compile: got another object, want the model that was passed")
