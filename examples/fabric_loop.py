"""A training loop of Lightning Fabric with `ModelParallelStrategy`: FSDP2 in `parallelize_fn`, checkpoints by
`fabric.save` and `fabric.load`.

Run: `torchrun --standalone --nproc-per-node 2 examples/fabric_loop.py`
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import graphshard
from common import arguments, build_model, say, text
from graphshard.demo.model import Decoder

MICROBATCHES = 2


def parallelize(model: Decoder, mesh: DeviceMesh, backend: str) -> Decoder:
    """Shards a model; Fabric calls it in `setup`."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    if backend != "none":
        graphshard.compile(model, backend=backend)  # the one line that was added
    return model


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Trains; returns this rank's losses."""
    args = arguments(__doc__, argv)
    strategy = ModelParallelStrategy(
        partial(parallelize, backend=args.backend), data_parallel_size=2, tensor_parallel_size=1
    )
    fabric = Fabric(accelerator="auto", devices=2, strategy=strategy)
    fabric.launch()
    batches = text(fabric.global_rank, fabric.world_size)

    model = fabric.setup_module(build_model())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule.state_dict(), "step": 0}
    if args.resume:
        fabric.load(args.checkpoint, state)
        schedule.load_state_dict(state["schedule"])

    losses = []
    for step in range(state["step"], args.steps):
        total = torch.zeros(())
        for microbatch in range(MICROBATCHES):
            with fabric.no_backward_sync(model, enabled=microbatch < MICROBATCHES - 1):
                tokens, targets = batches.draw(step, microbatch)
                loss = model(tokens, targets) / MICROBATCHES
                fabric.backward(loss)
            total += loss.detach()
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(say(fabric.global_rank, step, total))
        if args.checkpoint is not None and step + 1 == args.save_after:
            fabric.save(args.checkpoint, state | {"schedule": schedule.state_dict(), "step": step + 1})
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
