"""Small models for the scale studies."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphshard.scale.checkpointing import block_runner
from graphshard.scale.decoder import Decoder, DecoderSize
from graphshard.scale.estimate import Workload
from graphshard.scale.model_size import Repetition
from graphshard.scale.trace import Traced, trace_step

SIZE = DecoderSize(dim=512, layers=0, heads=8, kv_heads=2, ffn=1024, vocab=1024)
BATCH, SEQ = 2, 512


def decoder(layers: int, checkpointing: str = "none") -> tuple[nn.Module, tuple[Tensor, ...]]:
    size = DecoderSize(**{**vars(SIZE), "layers": layers})
    tokens = torch.randint(SIZE.vocab, (BATCH, SEQ))
    return Decoder(size, block_runner(checkpointing)), (tokens, tokens)


def traced_decoder(layers: int = 4, checkpointing: str = "none", tensor: int = 1) -> Traced:
    return _traced(layers, checkpointing, tensor)


@cache  # a trace takes seconds; tests only read it
def _traced(layers: int, checkpointing: str, tensor: int) -> Traced:
    return trace_step(lambda: decoder(layers, checkpointing), tensor, "decoder" if tensor > 1 else "")


def workload(traced: Traced, layers: int) -> Workload:
    """As if `traced` had `layers` blocks."""
    units = tuple(sorted({param.unit for param in traced.params if param.unit}))
    return Workload(traced, Repetition(units, layers), BATCH * SEQ)


class Mean(nn.Module):
    """Small equal blocks; a forward that returns a loss."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))
        self.activation: Callable[[Tensor], Tensor] = F.gelu

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.activation(block(x))
        return x.mean()


class Masking(Mean):
    """Its masks are computed for backward at the end of forward, behind all blocks."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__(layers)
        self.activation = F.relu


class Breaking(Mean):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


class Detached(Mean):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


def mean(batch: int, seq: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Mean(), (torch.randn(batch, seq, 64),)


@cache
def traced_mean(layers: int, model: type[Mean] = Mean) -> Traced:
    return trace_step(lambda: (model(layers), (torch.randn(BATCH, SEQ, 64),)))


def only_a_module(batch: int, seq: int) -> Any:
    return Mean()


NOT_A_FUNCTION = 3
