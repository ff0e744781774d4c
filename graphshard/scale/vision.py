"""A vision transformer, written for tracing."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphshard.scale.decoder import RunBlock

PATCH = 16


class VitBlock(nn.Module):
    """Attention over all patches, then a GELU network. `[B, T, dim]` -> the same."""

    def __init__(self, dim: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, ffn), nn.Linear(ffn, dim)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(queries, keys, values)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))  # type: ignore[no-any-return]


class Vit(nn.Module):
    """Patches `[B, T, 3 * 16 * 16]` and classes `[B]` -> mean cross entropy of 1,000 classes, by mean pooling."""

    def __init__(self, dim: int, layers: int, heads: int, ffn: int, seq: int, run_block: RunBlock) -> None:
        super().__init__()
        self.run_block = run_block
        self.patches = nn.Linear(3 * PATCH * PATCH, dim)
        self.positions = nn.Parameter(torch.empty(seq, dim))
        self.blocks = nn.ModuleList(VitBlock(dim, heads, ffn) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 1000)

    def forward(self, pixels: Tensor, classes: Tensor) -> Tensor:
        x = self.patches(pixels) + self.positions
        for block in self.blocks:
            x = self.run_block(block, x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)).float(), classes)
