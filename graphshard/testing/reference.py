"""The model under eager FSDP2, in the units that graphshard would make: what a compiled model is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import graphshard
from graphshard.units import resolve_units

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

    Raises:
        ValueError: if the options ask for another strategy than ``"fully_shard"`` and there is no `annotate`.
    """
    if annotate is not None:
        annotate(model, mesh)
        return
    if (strategy := options.get("strategy", "fully_shard")) != "fully_shard":
        raise ValueError(
            f"strategy: got {strategy!r}; the reference knows fully_shard only: pass annotate(model, mesh)"
        )
    kwargs = {name: options[name] for name in _FULLY_SHARD if options.get(name) is not None}
    for unit in resolve_units(model, options.get("units")):
        fully_shard(unit, mesh=mesh, **kwargs)
    fully_shard(model, mesh=mesh, **kwargs)


def shard_compiled(
    model: nn.Module, mesh: DeviceMesh, backend: str, options: Mapping[str, Any], annotate: Annotate | None
) -> None:
    """Shards and compiles `model` in place with graphshard: the other side of `shard_eager`."""
    if annotate is None:
        compiled = graphshard.compile(model, mesh, backend=backend, **options)
    else:
        annotate(model, mesh)
        compiled = graphshard.compile(model, backend=backend, **options)
    if compiled is not model:
        raise AssertionError("graphshard.compile: got another object, want the model that was passed")
