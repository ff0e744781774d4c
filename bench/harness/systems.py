"""What trains side by side in benches of training: one model, sharded and compiled in different ways."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import graphshard
from bench.harness import variants
from bench.harness.variants import Forward

SystemName = Literal["fsdp2", "fsdp2+compile", "ddp+compile", "graphshard", "replicate+compile", "simplefsdp"]
ALL_NAMES: tuple[SystemName, ...] = get_args(SystemName)
SYSTEM_NAMES: tuple[SystemName, ...] = ("fsdp2", "fsdp2+compile", "ddp+compile", "graphshard")
# Those whose parameters are whole on each rank.
REPLICATING: tuple[SystemName, ...] = ("ddp+compile", "replicate+compile")
# Ratios are to the faster of these: what users of FSDP2 have without graphshard.
PEERS: tuple[SystemName, ...] = ("fsdp2", "fsdp2+compile")
BACKENDS = ("inductor", "aot_eager")
PLANS = ("fsdp2", "auto")
REGIONS = ("model", "unit")
# More than any model here can use: the planner is free.
MEMORY_BUDGET_BYTES = 64 * 2**30


@dataclass(frozen=True)
class System:
    """One way to train a model.

    Attributes:
        backend: what runs the graphs; ``"eager"``: there are none.
        plan, regions: of `graphshard.compile`; a plan of None: another system.
    """

    name: SystemName
    backend: str
    plan: str | None = None
    regions: str = "model"

    def __str__(self) -> str:
        if self.plan is None:
            return self.name
        regions = "" if self.regions == "model" else f", regions {self.regions}"
        return f"{self.name}, {self.backend}, plan {self.plan}{regions}"


def systems(
    names: Sequence[SystemName], backends: Sequence[str], plans: Sequence[str], regions: Sequence[str] = ("model",)
) -> list[System]:
    """All that are asked for; `backends`, `plans` and `regions` are graphshard's."""
    found = []
    for name in dict.fromkeys(names):
        if name == "graphshard":
            found += [
                System(name, *asked)
                for asked in product(dict.fromkeys(backends), dict.fromkeys(plans), dict.fromkeys(regions))
            ]
        else:
            found.append(System(name, "eager" if name == "fsdp2" else "inductor"))
    return found


def refusal(plan: str) -> str | None:
    """Why this graphshard cannot be measured with a plan; None if it can."""
    if plan == "auto" and "memory_budget" not in inspect.signature(graphshard.compile).parameters:
        return "plan auto: skipped: this version's graphshard.compile plans nothing, it has no `memory_budget`"
    return None


def prepare(system: System, model: nn.Module) -> Forward:
    """Makes `model` train as `system` says, in place, over all ranks; returns what to call instead of the model.

    Args:
        system: one whose plan is not refused.
        model: a plain module whose repeated blocks are in `model.blocks`.
    """
    if system.name == "fsdp2":
        return variants.prepare("FSDP2", model, system.backend)
    if system.name == "fsdp2+compile":
        return variants.prepare("FSDP2 + torch.compile of blocks", model, system.backend)
    if system.name == "ddp+compile":
        return DistributedDataParallel(torch.compile(model, backend=system.backend))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if system.name == "replicate+compile":
        return _replicated(model, mesh, system.backend)
    if system.name == "simplefsdp":
        return _simple_fsdp(model, mesh, system.backend)
    options: dict[str, Any] = {
        "backend": system.backend, "plan": system.plan, "regions": system.regions, "strict": True,
    }  # fmt: skip
    if system.plan == "auto":
        options["memory_budget"] = MEMORY_BUDGET_BYTES
    return graphshard.compile(model, mesh, **options)


def _simple_fsdp(model: nn.Module, mesh: DeviceMesh, backend: str) -> Forward:
    """torchtitan's, which sums gradients where the others take their mean: its trainer divides the loss."""
    from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel

    sharded = torch.compile(data_parallel(model, mesh, "fully_shard"), backend=backend)

    def forward(*inputs: Tensor) -> Tensor:
        loss: Tensor = sharded(*inputs)
        if loss.requires_grad:
            loss.register_hook(lambda grad: grad / mesh.size())
        return loss

    return forward


def _replicated(model: nn.Module, mesh: DeviceMesh, backend: str) -> Forward:
    """Torch's `replicate` of each block, compiled, and of the rest."""
    blocks = model.blocks
    assert isinstance(blocks, nn.ModuleList)
    for i, block in enumerate(blocks):
        compiled: Any = torch.compile(block, backend=backend, fullgraph=True)
        blocks[i] = replicate(compiled, mesh=mesh)  # type: ignore[arg-type]
    replicate(model, mesh=mesh)  # type: ignore[arg-type]
    return model
