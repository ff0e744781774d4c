"""Tensor parallelism of the presets."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from graphshard.scale.decoder import Decoder

PLANS = ("decoder",)


def parallelize(model: nn.Module, mesh: DeviceMesh, plan: str) -> None:
    """Splits projections over `mesh` by columns, then by rows, and norms by the sequence.

    The loss is that of each rank's part of the vocabulary: its all-reduces, of a number per token, are left out.
    Source: tensor and sequence parallelism as in torchtitan.

    Raises:
        ValueError: there is no such plan for the model.
    """
    if plan != "decoder" or not isinstance(model, Decoder):
        raise ValueError(
            f"tp: got {mesh.size()} ranks for a {type(model).__name__}, which has no plan of tensor parallelism; "
            "want 1, or a llama3 preset"
        )
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1)),
        },
        src_data_rank=None,
    )
    for layer in model.layers:
        styles: dict[str, ParallelStyle] = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w3": ColwiseParallel(),
        }
        parallelize_module(layer, mesh, styles, src_data_rank=None)
