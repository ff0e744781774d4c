"""Models so small that the host's work is all there is to see: ordinary PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphshard.demo.model import Decoder, ModelConfig

PARAMS_PER_BLOCK = 6
BATCH_SIZE = 2


class SmallBlock(nn.Module):
    """Six small parameters: a norm and two linear layers, added to the residual stream."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, dim)
        self.down = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, dim]` to the same."""
        added: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return added


class ManyParameters(nn.Module):
    """Nothing but blocks: many parameters, hardly any arithmetic. Its result is a loss."""

    def __init__(self, num_params: int, blocks_per_unit: int, dim: int = 16) -> None:
        super().__init__()
        count = num_params // PARAMS_PER_BLOCK // blocks_per_unit
        self.blocks = nn.ModuleList(
            SmallBlock(dim)
            if blocks_per_unit == 1
            else nn.Sequential(*(SmallBlock(dim) for _ in range(blocks_per_unit)))
            for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, dim]` to a scalar."""
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def many_parameters(num_params: int, blocks_per_unit: int = 1) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model of `num_params` parameters in blocks of six, and its inputs; the same in every process."""
    torch.manual_seed(0)
    model = ManyParameters(num_params, blocks_per_unit)
    return model, (torch.randn(BATCH_SIZE, 16),)


def decoder(num_layers: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The demo's decoder with small dims, and its inputs; the same in every process."""
    torch.manual_seed(0)
    config = ModelConfig(n_layers=num_layers, dim=64, n_heads=2, hidden_dim=128, max_seq_len=16, vocab_size=64)
    tokens = torch.randint(config.vocab_size, (2, BATCH_SIZE, config.max_seq_len))
    return Decoder(config), (tokens[0], tokens[1])
