"""What trains in `bench.overlap`: one decoder, sharded and compiled in different ways."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import graphshard
from bench.harness.variants import Forward
from bench.overlap.simple_fsdp import simple_fsdp
from graphshard.scale.decoder import Decoder, DecoderSize

OverlapSystem = Literal[
    "FSDP2",
    "FSDP2 + torch.compile",
    "per parameter + torch.compile",
    "graphshard, plan fsdp2",
    "graphshard, plan auto",
]
SYSTEMS: tuple[OverlapSystem, ...] = get_args(OverlapSystem)
REFERENCE: OverlapSystem = "FSDP2"
PEERS: tuple[OverlapSystem, ...] = SYSTEMS[:3]
AUTO: OverlapSystem = "graphshard, plan auto"

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LLAMA_8B = DecoderSize(dim=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128256)
TINY = DecoderSize(dim=64, layers=2, heads=4, kv_heads=2, ffn=160, vocab=96)
# A head with these weights has a loss of about log(vocab) at first, as trained models begin.
_SCALE = 0.02


def make_decoder(size: DecoderSize, device: str, seed: int = 0) -> Decoder:
    """A decoder in fp32, the same in every process."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = Decoder(size, _run)
    for param in model.parameters():
        if param.dim() > 1:
            nn.init.normal_(param, std=_SCALE)
    return model


def _run(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)  # type: ignore[no-any-return]


def prepare(
    system: OverlapSystem, model: Decoder, mesh: DeviceMesh, hardware: str, backend: str = "inductor"
) -> Forward:
    """Makes `model` train as `system` says, in place; returns what to call instead of it.

    The units are the embedding, each block, and the head; parameters are held and reduced in fp32, gathered in bf16.

    Args:
        system: one of `SYSTEMS`.
        model: of `make_decoder`.
        mesh: 1-D.
        hardware: path of a file for graphshard's planner.
        backend: of everything that compiles.
    """
    if system == "per parameter + torch.compile":
        simple_fsdp(model, mesh, POLICY)
        compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
        function: Forward = compiled
        return function
    for i, layer in enumerate(model.layers):
        if system == "FSDP2 + torch.compile":
            model.layers[i] = torch.compile(layer, backend=backend, fullgraph=True)  # type: ignore[assignment]
    for unit in (model.embedding, *model.layers, model.head, model):
        fully_shard(unit, mesh=mesh, mp_policy=POLICY)
    if system.startswith("FSDP2"):
        return model
    plan = system.rpartition(" ")[2]
    return graphshard.compile(model, backend=backend, plan=plan, hardware=hardware, strict=True)
