"""What the examples share, and what is not their point: arguments, a small decoder, English text, lines of losses."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from graphshard.demo.model import Decoder, ModelConfig
from graphshard.demo.text import Batches

SMALL = ModelConfig(n_layers=3, dim=64, n_heads=4, hidden_dim=128, max_seq_len=32)
BATCH_SIZE = 4


def arguments(description: str | None, argv: Sequence[str] | None) -> argparse.Namespace:
    """What every example is asked: which engine, how long, and where its checkpoint is."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--backend", default="inductor", help="of graphshard.compile; 'none': eager FSDP2")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--checkpoint", type=Path, help="a folder: written after --save-after steps")
    parser.add_argument("--save-after", type=int, default=4)
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint")
    asked = parser.parse_args(argv)
    if asked.resume and asked.checkpoint is None:
        parser.error("--resume: got no --checkpoint, want the folder of an earlier run")
    return asked


def build_model() -> Decoder:
    """The same parameters on every rank."""
    torch.manual_seed(0)
    return Decoder(SMALL)


def text(rank: int, world_size: int) -> Batches:
    """`draw(step, microbatch)` yields tokens and targets, each int64 `[BATCH_SIZE, max_seq_len]`."""
    return Batches(rank, world_size, BATCH_SIZE, SMALL.max_seq_len)


def say(rank: int, step: int, loss: Tensor | float) -> float:
    """Prints the loss of a step, all of its digits, on rank 0; returns it."""
    value = float(loss)
    if rank == 0:
        print(f"step {step}: loss {value!r}", flush=True)
    return value
