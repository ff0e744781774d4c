"""The models that are measured: ordinary PyTorch. Most are so small that the host's work is all there is to see; those
that `bench.step` trains compute and communicate for milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from graphshard.demo.model import Decoder, ModelConfig

PARAMS_PER_BLOCK = 6
BATCH_SIZE = 2


class Block(nn.Module):
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
            Block(dim) if blocks_per_unit == 1 else nn.Sequential(*(Block(dim) for _ in range(blocks_per_unit)))
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


@dataclass(frozen=True)
class Sizes:
    """Of a decoder that is trained, and how many sequences of `config.max_seq_len` bytes a rank has in each step."""

    config: ModelConfig
    batch_size: int


def _stack(dim: int, num_layers: int, batch_size: int, seq_len: int) -> Sizes:
    """The demo's decoder with its proportions: heads of 64, feed-forward layers of 11/4 `dim`."""
    return Sizes(ModelConfig(num_layers, dim, dim // 64, 11 * dim // 4, seq_len), batch_size)


# From many small collectives to few large ones.
TRAINED: dict[str, Sizes] = {
    "d128_L12": _stack(128, 12, 4, 64),
    "d256_L6": _stack(256, 6, 4, 128),
    "d512_L6": _stack(512, 6, 2, 128),
    "demo": Sizes(ModelConfig(), 8),
}


# Of `bench.regions`: few and many equal blocks, of each width.
WIDTHS, FEW_BLOCKS, MANY_BLOCKS = (256, 512), 2, 24
EQUAL_BLOCKS: dict[str, Sizes] = {
    f"d{dim}_L{num_layers}": _stack(dim, num_layers, 4, 64)
    for dim in WIDTHS
    for num_layers in (FEW_BLOCKS, MANY_BLOCKS)
}


def sizes_of(name: str) -> Sizes:
    """Of a model of `TRAINED` or `EQUAL_BLOCKS`."""
    return {**TRAINED, **EQUAL_BLOCKS}[name]


def trained_decoder(name: str) -> Decoder:
    """A model of these names; the same in every process."""
    torch.manual_seed(0)
    return Decoder(sizes_of(name).config)
