"""A byte-level decoder transformer: ordinary PyTorch, nothing in it knows of sharding or compiling."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """Sizes; the default has 3.3 million parameters."""

    n_layers: int = 4
    dim: int = 256
    n_heads: int = 4
    hidden_dim: int = 704
    max_seq_len: int = 128
    vocab_size: int = 256
    dropout: float = 0.0


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, seq, dim]` to the same."""
        batch, seq, dim = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, self.n_heads, dim // self.n_heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.out(attended.transpose(1, 2).reshape(batch, seq, dim))
        return mixed


class SwiGLU(nn.Module):
    """The gated feed-forward layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, seq, dim]` to the same."""
        projected: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return projected


class Block(nn.Module):
    """One layer: pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim)
        self.feed_forward = SwiGLU(config)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, seq, dim]` to the same."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        added: Tensor = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return added


class Decoder(nn.Module):
    """Byte and position embeddings, the blocks, and a head tied to the byte embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.dim)
        self.position_embedding = nn.Embedding(config.max_seq_len, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.head.weight = self.token_embedding.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy of predicting `targets` from `tokens`, byte values, each int64 `[batch, seq]`."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
