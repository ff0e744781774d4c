"""A per-parameter baseline: each DTensor is gathered where it is read, and `torch.compile` sees it all.

Nothing is bucketed or moved: what plain tracing of sharded parameters gives.
Source: SimpleFSDP (arXiv 2411.00284): parametrization by DTensor, gathers recomputed in backward.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_AGAIN = frozenset(
    {
        torch.ops._c10d_functional.all_gather_into_tensor.default,
        torch.ops._c10d_functional.wait_tensor.default,
        torch.ops.aten._to_copy.default,  # noqa: SLF001
    }
)


def simple_fsdp(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> nn.Module:
    """Shards every parameter on its first dim, in place; ``w`` becomes ``own_w``, and reading ``w`` gathers it."""
    gathered = partial(_gathered, policy=policy)
    for module in list(model.modules()):
        reads = {}
        for name, param in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            own = nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)]))
            module.register_parameter(f"own_{name}", own)
            reads[name] = property(partial(_read, name=f"own_{name}", gathered=gathered))
        if reads:
            module.__class__ = type(f"Gathering{type(module).__name__}", (type(module),), reads)
    return model


def _read(module: nn.Module, name: str, gathered: Any) -> Tensor:
    whole: Tensor = checkpoint(gathered, getattr(module, name), use_reentrant=False, context_fn=_contexts)
    return whole


def _gathered(own: DTensor, policy: MixedPrecisionPolicy) -> Tensor:
    whole = own.redistribute(
        placements=[Replicate()], forward_dtype=policy.param_dtype, backward_dtype=policy.reduce_dtype
    )
    return whole.to_local(grad_placements=[Partial("avg")])


def _contexts() -> Any:
    def choose(ctx: Any, target: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_RECOMPUTE if target in _AGAIN else CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(choose)
