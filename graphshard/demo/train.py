"""A model under one engine, eager FSDP2 or graphshard, with its optimizer: steps, collectives, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import graphshard
from graphshard.demo.model import Decoder, ModelConfig
from graphshard.demo.text import Batches
from graphshard.testing.launches import count_launches

MICROBATCHES = 2
MAX_GRAD_NORM = 1.0
LEARNING_RATE = 1e-3


def shard(model: Decoder, mesh: DeviceMesh, backend: str | None) -> None:
    """Shards a model in place, one unit per block and the root; afterwards it is an `FSDPModule` too.

    Args:
        model: a decoder with the same parameters on every rank.
        mesh: the 1-D mesh to shard over.
        backend: None for eager FSDP2, else the backend of `graphshard.compile`.
    """
    if backend is not None:
        graphshard.compile(model, mesh, backend=backend)
    else:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)


@dataclass(frozen=True)
class StepResult:
    """What one training step of one rank did: its own mean loss, the gradients' norm over all ranks before clipping."""

    loss: float
    grad_norm: float
    wall_s: float


class DemoTrainer:
    """Trains one model.

    Args:
        backend: None for eager FSDP2, else the backend of `graphshard.compile`.
        mesh: the 1-D mesh to shard over.
        batches: this rank's text.
        seed: of the initial parameters.
        make_model: makes the decoder.
    """

    def __init__(
        self,
        backend: str | None,
        mesh: DeviceMesh,
        batches: Batches,
        seed: int = 0,
        make_model: Callable[[], Decoder] = lambda: Decoder(ModelConfig()),
    ) -> None:
        torch.manual_seed(seed)
        self.model = make_model()
        shard(self.model, mesh, backend)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, foreach=True)
        self._batches = batches

    def forward_backward(self, step: int) -> float:
        """Accumulates the gradients of every microbatch, reduces them with the last one; returns the mean loss."""
        assert isinstance(self.model, FSDPModule)
        losses = []
        for microbatch in range(MICROBATCHES):
            self.model.set_requires_gradient_sync(microbatch == MICROBATCHES - 1)
            tokens, targets = self._batches.draw(step, microbatch)
            loss: Tensor = self.model(tokens, targets) / MICROBATCHES
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return float(torch.stack(losses).sum())

    def step(self, step: int) -> StepResult:
        """One optimizer step."""
        start_s = time.perf_counter()
        loss = self.forward_backward(step)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM, foreach=True)
        if isinstance(grad_norm, DTensor):
            grad_norm = grad_norm.full_tensor()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return StepResult(loss, float(grad_norm), time.perf_counter() - start_s)

    def count_collectives(self, step: int) -> dict[str, int]:
        """Collectives that one step's forwards and backwards launch, seen by torch's profiler; trains nothing."""
        with count_launches() as launches:
            self.forward_backward(step)
        self.optimizer.zero_grad()
        return launches

    def state(self) -> dict[str, Any]:
        """Parameters and optimizer state by name, as they are saved and loaded: sharded, not copied."""
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Takes over what was loaded into `state()`."""
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def save(self, folder: Path) -> None:
        """Writes parameters and optimizer state as a distributed checkpoint."""
        state_dict_saver.save(self.state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote, whichever engine it was."""
        state = self.state()
        state_dict_loader.load(state, checkpoint_id=folder)
        self.set_state(state)
