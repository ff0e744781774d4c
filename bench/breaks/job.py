"""Steps of a decoder with a graph break in each block and without, sharded and not, in one process for each rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.demo.model import Block, Decoder, ModelConfig

# (sharded by graphshard, with breaks)
VARIANTS = ((False, False), (False, True), (True, False), (True, True))
NAMES = ("torch.compile, whole", "torch.compile, broken", "graphshard, whole", "graphshard, broken")
BATCH, SEQ = 4, 64
WARM_UP = 4


@torch.compiler.disable
def seen(x: Tensor) -> Tensor:
    """What Dynamo must not trace: its graph ends here."""
    return x


class BrokenBlock(Block):
    """A block with a graph break between its two parts."""

    def forward(self, x: Tensor) -> Tensor:
        x = seen(x + self.attention(self.attention_norm(x)))
        added: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return added


def _decoder(blocks: int, width: int, broken: bool) -> Decoder:
    torch.manual_seed(0)
    config = ModelConfig(n_layers=blocks, dim=width, n_heads=4, hidden_dim=2 * width, max_seq_len=SEQ)
    model = Decoder(config)
    if broken:
        for block in model.blocks:
            block.__class__ = BrokenBlock
    return model


def _step(run: Callable[..., Any], model: nn.Module, optimizer: Any, index: int) -> float:
    generator = torch.Generator().manual_seed(index * 2 + dist.get_rank())
    tokens = torch.randint(256, (BATCH, SEQ), generator=generator)
    dist.barrier()
    start = time.perf_counter()
    run(tokens, tokens.roll(-1, 1)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start


def measure(blocks: int, width: int, steps: int, rounds: int, backend: str) -> list[list[float]]:
    """Seconds of each step of each of `VARIANTS`, in turns. Runs on each rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    jobs = []
    for sharded, broken in VARIANTS:
        torch.compiler.reset()
        model: Any = _decoder(blocks, width, broken)
        run = graphshard.compile(model, mesh, backend=backend) if sharded else torch.compile(model, backend=backend)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for index in range(WARM_UP):
            _step(run, model, optimizer, index)
        jobs.append((run, model, optimizer))
    found: list[list[float]] = [[] for _ in VARIANTS]
    for turn in range(rounds):
        for times, job in zip(found, jobs, strict=True):
            times += [_step(*job, 100 + turn * steps + index) for index in range(steps + 1)][1:]
    return found
