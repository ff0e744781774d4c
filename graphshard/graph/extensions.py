"""A parameter of a tensor subclass with all-gather extensions in a trace: made of what is gathered in its place.

    %a = unshard(%shard, wire=%bytes);  %w = extended(%shard, %a, ...)

What a module sees is the result of the subclass's own `fsdp_post_all_gather`, which AOTAutograd traces; what backward
computes for it is reduced like any gradient of the shard.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphshard.fsdp2 import whole_parameter
from graphshard.graph.markers import REDUCE_GRAD


class _Extended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, spec: str, gathered: Tensor, kind: str, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(shard)
        ctx.spec = spec
        ctx.arguments = 4 + len(tensors)
        return whole_parameter(kind, gathered, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (shard,) = ctx.saved_tensors
        return REDUCE_GRAD(grads[0], shard, ctx.spec), *[None] * (ctx.arguments - 1)


def _extended(shard: Tensor, spec: str, gathered: Tensor, kind: str, *tensors: Tensor) -> Tensor:
    """The parameter as modules see it.

    Args:
        shard: flat padded `[N]`, in the parameter's dtype.
        spec: of its reduction.
        gathered: `[W * n]`, uint8, what all ranks have sent.
        kind: of the `AllGatherExtension`.
        *tensors: likewise.
    """
    full: Tensor = _Extended.apply(shard, spec, gathered, kind, *tensors)  # type: ignore[no-untyped-call]
    return full


# One node of what Dynamo captures: a subclass's methods need not be traceable by it.
EXTENDED = torch.compiler.allow_in_graph(_extended)  # type: ignore[no-untyped-call]
