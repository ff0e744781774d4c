"""What is compared: one model, run in different ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import graphshard

Variant = Literal[
    "eager, unsharded",
    "torch.compile, unsharded",
    "graphshard",
    "graphshard, regions=unit",
    "FSDP2",
    "FSDP2 + torch.compile of blocks",
]
VARIANTS: tuple[Variant, ...] = get_args(Variant)
REFERENCE: Variant = "torch.compile, unsharded"

Forward = Callable[..., Tensor]


def prepare(variant: Variant, model: nn.Module, backend: str) -> Forward:
    """Makes `model` run as `variant` says, sharded in place over all ranks where it shards.

    Args:
        variant: one of `VARIANTS`.
        model: a plain module whose repeated blocks are in `model.blocks`.
        backend: of `torch.compile` and of `graphshard.compile`.

    Returns:
        What to call instead of the model.
    """
    if variant == "eager, unsharded":
        return model
    if variant == "torch.compile, unsharded":
        compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
        function: Forward = compiled
        return function
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if variant == "graphshard":
        return graphshard.compile(model, mesh, backend=backend, regions="model", strict=True)
    if variant == "graphshard, regions=unit":
        return graphshard.compile(model, mesh, backend=backend, regions="unit", strict=True)
    blocks = model.blocks
    assert isinstance(blocks, nn.ModuleList)
    for i, block in enumerate(blocks):
        if variant == "FSDP2 + torch.compile of blocks":
            blocks[i] = torch.compile(block, backend=backend, fullgraph=True)  # type: ignore[assignment]
        fully_shard(blocks[i], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def check_compiled(variant: Variant, model: nn.Module) -> None:
    """Makes sure that what is measured as graphshard is no fall back to eager FSDP2.

    Raises:
        RuntimeError: if no program ran, or if something was not compiled.
    """
    if not variant.startswith("graphshard"):
        return
    report = graphshard.report(model)
    if report.fallbacks or report.eager_unshards or not all(program.runs for program in report.programs):
        raise RuntimeError(f"bench: want every call in compiled programs, got\n{report}")
