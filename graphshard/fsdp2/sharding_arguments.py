"""Arguments of `graphshard.compile` that `fully_shard` would refuse, refused before it has sharded anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


def check_parameters(model: nn.Module, ignored: set[nn.Parameter]) -> None:
    """Refuses parameters that cannot be sharded."""
    for name, param in model.named_parameters():
        if param in ignored:
            continue
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ValueError(f"compile: parameter '{name}' is not initialized yet; run the lazy module once before")
        if param.ndim == 0:
            raise ValueError(f"compile: parameter '{name}' is a scalar; make it a tensor of one element, shape [1]")
        if not param.is_contiguous():
            raise NotImplementedError(
                f"compile: parameter '{name}' of shape {tuple(param.shape)} has strides {param.stride()}, not "
                "contiguous ones; register a contiguous copy"
            )


def check_reshard(count: int, ranks: int) -> None:
    """Refuses a `reshard_after_forward` that does not divide the ranks of the mesh."""
    if not 1 <= count <= ranks or ranks % count:
        raise ValueError(f"compile: reshard_after_forward: got {count}, want a factor of the {ranks} ranks of the mesh")


def check_placements(
    model: nn.Module, mesh: DeviceMesh, placement_of: Callable[[nn.Parameter], Any], ignored: set[nn.Parameter]
) -> None:
    """Refuses what the user's `shard_placement_fn` says, where it cannot be done."""
    for name, param in model.named_parameters():
        placement = None if param in ignored else placement_of(param)
        if placement is None or hasattr(placement, "mesh_info") or isinstance(param, DTensor):
            continue  # FSDP2's default; one with a mesh of its own; one whose local size decides
        where = f"compile: shard_placement_fn of parameter '{name}' of shape {tuple(param.shape)}"
        if not isinstance(placement, Shard):
            raise ValueError(f"{where}: got {placement!r:.80}, want a Shard or None")
        dim, ranks = placement.dim + param.ndim * (placement.dim < 0), mesh.size(mesh.ndim - 1)
        if not 0 <= dim < param.ndim:
            raise ValueError(f"{where}: got {placement}, want a dim in [{-param.ndim}, {param.ndim - 1}]")
        if dim > 0 and param.shape[dim] % ranks:
            raise NotImplementedError(
                f"{where}: got {placement}, which does not divide evenly by {ranks} ranks; only dim 0 may be uneven"
            )
