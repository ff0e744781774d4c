"""Decoders: Llama 3 and a mixture of experts with dense dispatch, and MPT. Written for tracing, not for training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Runs one block: as it is, or checkpointed.
RunBlock = Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class DecoderSize:
    """Shape of a decoder.

    Attributes:
        dim: of the residual stream.
        layers: number of blocks.
        heads, kv_heads: of attention; `kv_heads` divides `heads`.
        ffn: inner width of a feed-forward network.
        vocab: number of tokens.
        experts: feed-forward networks of a block; 1: no router.
        top_k: experts that a token is for.
    """

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    experts: int = 1
    top_k: int = 1


class Rotary(nn.Module):
    """Rotary positions of heads `[B, T, H, D]`: pairs of features `(i, i + D / 2)` are rotated."""

    def __init__(self, head_dim: int, theta: float = 500_000.0) -> None:
        super().__init__()
        self.head_dim, self.theta = head_dim, theta

    def forward(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        half = self.head_dim // 2
        steps = torch.arange(half, device=queries.device, dtype=torch.float32)
        places = torch.arange(queries.shape[1], device=queries.device, dtype=torch.float32)
        angles = torch.outer(places, self.theta ** (-steps / half))
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]

        def rotated(heads: Tensor) -> Tensor:
            left, right = heads.float().chunk(2, dim=-1)
            return torch.cat([left * cos - right * sin, left * sin + right * cos], -1).to(heads.dtype)

        return rotated(queries), rotated(keys)


class GroupedQueryAttention(nn.Module):
    """Causal attention, `kv_heads` shared by several heads each. `[B, T, dim]` -> the same.

    With tensor parallelism the projections yield fewer heads: they are counted by their width.
    """

    def __init__(self, size: DecoderSize) -> None:
        super().__init__()
        self.head_dim = size.dim // size.heads
        self.wq = nn.Linear(size.dim, size.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(size.dim, size.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(size.dim, size.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(size.heads * self.head_dim, size.dim, bias=False)
        self.rotary = Rotary(self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = (
            project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.wq, self.wk, self.wv)
        )
        queries, keys = self.rotary(queries, keys)
        shared = queries.shape[2] // keys.shape[2]
        keys, values = (
            heads[:, :, :, None].expand(-1, -1, -1, shared, -1).flatten(2, 3) if shared > 1 else heads
            for heads in (keys, values)
        )
        queries, keys, values = (heads.transpose(1, 2) for heads in (queries, keys, values))
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    """`w2(silu(w1 x) * w3 x)`."""

    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, ffn, bias=False)
        self.w2 = nn.Linear(ffn, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class DenseExperts(nn.Module):
    """Every expert computes every token; what a token is not for has weight 0."""

    def __init__(self, size: DecoderSize) -> None:
        super().__init__()
        self.top_k = size.top_k
        self.router = nn.Linear(size.dim, size.experts, bias=False)
        self.experts = nn.ParameterList()
        for _ in range(size.experts):
            self.experts.append(nn.Parameter(torch.empty(2 * size.ffn, size.dim)))
            self.experts.append(nn.Parameter(torch.empty(size.dim, size.ffn)))

    def forward(self, x: Tensor) -> Tensor:
        scores = F.softmax(self.router(x).float(), dim=-1)
        least = scores.topk(self.top_k, dim=-1).values[..., -1:]
        weights = torch.where(scores >= least, scores, 0.0).to(x.dtype)
        total = torch.zeros_like(x)
        for number in range(len(self.experts) // 2):
            gate, up = F.linear(x, self.experts[2 * number]).chunk(2, -1)
            total = total + weights[..., number, None] * F.linear(F.silu(gate) * up, self.experts[2 * number + 1])
        return total


class DecoderBlock(nn.Module):
    """One block of a Llama, or of a mixture of experts."""

    def __init__(self, size: DecoderSize) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.attention = GroupedQueryAttention(size)
        self.ffn_norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.feed_forward = SwiGLU(size.dim, size.ffn) if size.experts == 1 else DenseExperts(size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Tokens and targets `[B, T]` -> mean cross entropy in fp32. The head is a matrix of its own."""

    def __init__(self, size: DecoderSize, run_block: RunBlock) -> None:
        super().__init__()
        self.run_block = run_block
        self.embedding = nn.Embedding(size.vocab, size.dim)
        self.layers = nn.ModuleList(DecoderBlock(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.head = nn.Linear(size.dim, size.vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = self.run_block(layer, x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class MptBlock(nn.Module):
    """One block of an MPT: layer norms without bias, one projection for queries, keys and values, GELU."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim, bias=False), nn.LayerNorm(dim, bias=False)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))  # type: ignore[no-any-return]


class Mpt(nn.Module):
    """Tokens and targets `[B, T]` -> mean cross entropy. Learned positions; the embedding is the head, too."""

    def __init__(self, dim: int, layers: int, heads: int, vocab: int, seq: int, run_block: RunBlock) -> None:
        super().__init__()
        self.run_block = run_block
        self.embedding = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(seq, dim)
        self.blocks = nn.ModuleList(MptBlock(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = self.run_block(block, x)
        return F.cross_entropy(F.linear(self.norm(x), self.embedding.weight).flatten(0, 1).float(), targets.flatten())
