"""A training loop of Hugging Face accelerate with FSDP2 (`fsdp_version: 2`): `prepare`, `accumulate`, `save_state`.

Run: `torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py`
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState

import graphshard
from common import arguments, build_model, say, text

CUDA = torch.cuda.is_available()
MICROBATCHES = 2


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Trains; returns this rank's losses."""
    args = arguments(__doc__, argv)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        state_dict_type="SHARDED_STATE_DICT",
    )
    if not CUDA:  # where it knows of no GPUs, accelerate takes the plugin, says nothing of it, and trains by DDP
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    accelerator = Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=MICROBATCHES, cpu=not CUDA)
    batches = text(accelerator.process_index, accelerator.num_processes)

    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    if args.backend != "none":
        graphshard.compile(model, backend=args.backend)  # the one line that was added

    first = 0
    if args.resume:
        accelerator.load_state(str(args.checkpoint))
        first = args.save_after

    losses = []
    for step in range(first, args.steps):
        total = torch.zeros(())
        for microbatch in range(MICROBATCHES):
            with accelerator.accumulate(model):
                tokens, targets = batches.draw(step, microbatch)
                loss = model(tokens, targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            total += loss.detach() / MICROBATCHES
        losses.append(say(accelerator.process_index, step, total))
        if args.checkpoint is not None and step + 1 == args.save_after:
            accelerator.save_state(str(args.checkpoint))
    return losses


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
