"""How a block is run: as it is, or recomputed in backward, all of it or most of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from graphshard.scale.decoder import RunBlock

CHECKPOINTING = ("none", "selective", "full")

aten = torch.ops.aten
_MATMUL = aten.mm.default
_SAVED = frozenset(
    {
        aten._scaled_dot_product_flash_attention.default,  # noqa: SLF001
        aten._scaled_dot_product_efficient_attention.default,  # noqa: SLF001
        aten._scaled_dot_product_flash_attention_for_cpu.default,  # noqa: SLF001
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }
)


def block_runner(how: str) -> RunBlock:
    """What runs a block: one of `CHECKPOINTING`.

    ``"selective"`` saves the outputs of attention, of reduce-scatters of tensor parallelism and of every second matmul.
    Source: torchtitan's per-operator activation checkpointing.
    """
    if how == "none":
        return lambda block, x: block(x)
    contexts = {} if how == "full" else {"context_fn": _selective}

    def run(block: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(block, x, use_reentrant=False, **contexts)  # type: ignore[arg-type]
        return found

    return run


def _selective() -> Any:
    matmuls: Counter[bool] = Counter()

    def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator is _MATMUL:
            matmuls[ctx.is_recompute] += 1
            saved = matmuls[ctx.is_recompute] % 2 == 1
        else:
            saved = operator in _SAVED
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
