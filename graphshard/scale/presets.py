"""Models to study: by name, or made by a function of yours."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphshard.scale.decoder import Decoder, DecoderSize, Mpt, RunBlock
from graphshard.scale.vision import PATCH, Vit


@dataclass(frozen=True)
class Preset:
    """A model whose blocks are equal.

    Attributes:
        name: of the preset.
        layers: number of blocks.
        tokens: what a sequence has by default.
        build: (number of blocks, tokens of a sequence, what runs a block) -> model.
        inputs: (sequences, tokens of each) -> what its forward takes; it returns the loss.
        tensor_parallel: name of the plan of tensor parallelism, ``""``: there is none.
    """

    name: str
    layers: int
    tokens: int
    build: Callable[[int, int, RunBlock], nn.Module]
    inputs: Callable[[int, int], tuple[Tensor, ...]]
    tensor_parallel: str = ""


def _tokens(vocab: int) -> Callable[[int, int], tuple[Tensor, ...]]:
    def inputs(batch: int, seq: int) -> tuple[Tensor, ...]:
        return torch.randint(vocab, (batch, seq)), torch.randint(vocab, (batch, seq))

    return inputs


def _patches(batch: int, seq: int) -> tuple[Tensor, ...]:
    return torch.randn(batch, seq, 3 * PATCH * PATCH), torch.randint(1000, (batch,))


def decoder(name: str, size: DecoderSize, tokens: int) -> Preset:
    """A preset of a `Decoder`."""

    def build(layers: int, seq: int, run_block: RunBlock) -> nn.Module:
        return Decoder(DecoderSize(**{**vars(size), "layers": layers}), run_block)

    plan = "decoder" if size.experts == 1 else ""
    return Preset(name, size.layers, tokens, build, _tokens(size.vocab), plan)


def _mpt(name: str, dim: int, layers: int, heads: int, vocab: int) -> Preset:
    def build(layers: int, seq: int, run_block: RunBlock) -> nn.Module:
        return Mpt(dim, layers, heads, vocab, seq, run_block)

    return Preset(name, layers, 2048, build, _tokens(vocab))


def _vit(name: str, dim: int, layers: int, heads: int, ffn: int) -> Preset:
    def build(layers: int, seq: int, run_block: RunBlock) -> nn.Module:
        return Vit(dim, layers, heads, ffn, seq, run_block)

    return Preset(name, layers, 196, build, _patches)


PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        decoder("llama3-8b", DecoderSize(4096, 32, 32, 8, 14336, 128256), 8192),
        decoder("llama3-70b", DecoderSize(8192, 80, 64, 8, 28672, 128256), 8192),
        decoder("llama3-405b", DecoderSize(16384, 126, 128, 8, 53248, 128256), 8192),
        decoder("moe", DecoderSize(2048, 16, 16, 8, 4096, 32000, experts=8, top_k=2), 4096),
        _mpt("mpt-7b", 4096, 32, 32, 50432),
        _vit("vit-l", 1024, 24, 16, 4096),
    )
}


def find_preset(name_or_path: str) -> Preset | Callable[..., Any]:
    """A preset by its name, or the function at ``module:function``.

    Raises:
        ValueError: there is no such preset, module or function.
    """
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]
    module_name, colon, function_name = name_or_path.partition(":")
    if not colon:
        raise ValueError(
            f"model: got {name_or_path!r}, want one of {', '.join(PRESETS)}, or module:function, a function of "
            "(batch, seq) that returns a module and the inputs of its forward"
        )
    try:
        found = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"model: got {name_or_path!r}: {error}; want a module that can be imported") from error
    if not callable(found):
        raise ValueError(f"model: got {name_or_path!r}, a {type(found).__name__}, want a function of (batch, seq)")
    function: Callable[..., Any] = found
    return function
