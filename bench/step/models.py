"""The decoders that are trained: the demo's, in other sizes. They compute and communicate for milliseconds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphshard.demo.model import Decoder, ModelConfig


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
