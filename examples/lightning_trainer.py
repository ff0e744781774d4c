"""The Trainer of Lightning with `ModelParallelStrategy`: FSDP2 in `configure_model`, checkpoints by `save_checkpoint`
and `fit(ckpt_path=...)`.

Run: `torchrun --standalone --nproc-per-node 2 examples/lightning_trainer.py`
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

import graphshard
from common import arguments, build_model, say, text

MICROBATCHES = 2


class Training(pl.LightningModule):
    """A decoder that learns English."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args
        self.model = build_model()
        self.losses: list[float] = []
        self._total = torch.zeros(())

    def configure_model(self) -> None:
        """Shards the model; the Trainer calls it before it makes the optimizer."""
        if isinstance(self.model, FSDPModule):
            return  # called again
        assert self.device_mesh is not None
        for block in self.model.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])
        if self.args.backend != "none":
            graphshard.compile(self.model, backend=self.args.backend)  # the one line that was added

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW and a schedule of one step for each of its steps."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> DataLoader[int]:
        """Numbers of microbatches: what a rank draws for one follows from the step."""
        return DataLoader(range(MICROBATCHES * self.args.steps))  # type: ignore[arg-type]

    def training_step(self, _: Tensor, batch_index: int) -> Tensor:
        """The loss of a microbatch."""
        microbatch = batch_index % MICROBATCHES
        tokens, targets = text(self.global_rank, self.trainer.world_size).draw(self.global_step, microbatch)
        loss: Tensor = self.model(tokens.to(self.device), targets.to(self.device))
        self._total = loss.detach() / MICROBATCHES + (self._total if microbatch else 0.0)
        return loss

    def on_train_batch_end(self, _outputs: Any, _batch: Tensor, batch_index: int) -> None:
        """Behind the last microbatch of a step: its loss, and a checkpoint where one is wanted."""
        if batch_index % MICROBATCHES < MICROBATCHES - 1:
            return
        self.losses.append(say(self.global_rank, self.global_step - 1, self._total))
        if self.args.checkpoint is not None and self.global_step == self.args.save_after:
            self.trainer.save_checkpoint(self.args.checkpoint)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Trains; returns this rank's losses."""
    args = arguments(__doc__, argv)
    trainer = pl.Trainer(
        accelerator="auto",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_steps=args.steps,
        accumulate_grad_batches=MICROBATCHES,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    training = Training(args)
    trainer.fit(training, ckpt_path=args.checkpoint if args.resume else None)
    return training.losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
