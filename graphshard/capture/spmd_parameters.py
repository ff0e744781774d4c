"""Gathered parameters as DTensors on a mesh that has the data-parallel axes, too (`dp_mesh_dims` of `fully_shard`).

Over those axes a gradient stays as it comes, a partial sum or each rank's own: FSDP2's reduction adds it up. Which it
is AOTAutograd learns, not Dynamo; so to Dynamo all of it is one function, of a tensor and a text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from graphshard.fsdp2 import Layout

# By `key_of`: a mesh can be no constant of a captured graph. Shards hold them, so that a mesh may go.
_LAYOUTS: WeakValueDictionary[str, Layout] = WeakValueDictionary()


def key_of(layout: Layout) -> str:
    """What `on_whole_mesh` knows a layout by, as long as something else holds that: ``""`` if it needs no key."""
    if not layout.data_dims:
        return ""
    mesh = layout.mesh
    groups = " ".join(mesh.get_group(dim).group_name for dim in range(mesh.ndim))
    text = f"{groups}|{layout.placements}|{tuple(layout.shape)}|{layout.stride}|{layout.data_dims}"
    _LAYOUTS[text] = layout
    return text


class _OnWholeMesh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, full: Tensor, key: str) -> DTensor:
        ctx.layout = layout = _LAYOUTS[key]
        return DTensor.from_local(
            full, layout.mesh, layout.placements, run_check=False, shape=layout.shape, stride=layout.stride
        )

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, None]:
        layout: Layout = ctx.layout
        placements = [
            came if dim in layout.data_dims else own
            for dim, (came, own) in enumerate(zip(grad.placements, layout.placements, strict=True))
        ]
        return grad.redistribute(placements=placements).to_local(), None


def _on_whole_mesh(full: Tensor, key: str) -> DTensor:
    whole: DTensor = _OnWholeMesh.apply(full, key)  # type: ignore[no-untyped-call]
    return whole


# This rank's part of a parameter, gathered over the shards, and the key of its layout -> the DTensor of FSDP2's.
on_whole_mesh: Callable[[Tensor, str], DTensor] = torch.compiler.allow_in_graph(_on_whole_mesh)  # type: ignore[no-untyped-call]
