"""A training loop of plain PyTorch with FSDP2: `fully_shard` by hand, gradients accumulated and clipped, a schedule for
the learning rate, checkpoints by `torch.distributed.checkpoint`.

Run: `torchrun --standalone --nproc-per-node 2 examples/plain_loop.py`
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import graphshard
from common import arguments, build_model, say, text

MICROBATCHES = 2


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Trains; returns this rank's losses."""
    args = arguments(__doc__, argv)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank = dist.get_rank()
    batches = text(rank, dist.get_world_size())

    model = build_model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if args.backend != "none":
        graphshard.compile(model, backend=args.backend)  # the one line that was added

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)

    first = 0
    if args.resume:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "schedule": schedule.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=args.checkpoint)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        first = state["step"]

    losses = []
    for step in range(first, args.steps):
        total = torch.zeros(())
        for microbatch in range(MICROBATCHES):
            model.set_requires_gradient_sync(microbatch == MICROBATCHES - 1)
            tokens, targets = batches.draw(step, microbatch)
            loss = model(tokens, targets) / MICROBATCHES
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(say(rank, step, total))
        if args.checkpoint is not None and step + 1 == args.save_after:
            model_state, optimizer_state = get_state_dict(model, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state}
            dcp.save(state | {"schedule": schedule.state_dict(), "step": step + 1}, checkpoint_id=args.checkpoint)
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        main()
    finally:
        dist.destroy_process_group()
