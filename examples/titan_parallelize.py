"""torchtitan's Llama 3, sharded as torchtitan shards it: a `parallelize` function, its `apply_fsdp_to_decoder`, bf16
parameters with fp32 reductions, a mean over the tokens of all ranks, checkpoints by `torch.distributed.checkpoint`.

Run: `torchrun --standalone --nproc-per-node 2 examples/titan_parallelize.py`
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import TORCH_DTYPE_MAP, TrainingConfig
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_gqa_config
from torchtitan.models.llama3 import Llama3Model, llama3_configs

import graphshard
from common import arguments, say, text

LAYERS = 3


def parallelize(model: Llama3Model, mesh: DeviceMesh, training: TrainingConfig, backend: str) -> Llama3Model:
    """Shards a model."""
    apply_fsdp_to_decoder(
        model,
        mesh,
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        pp_enabled=False,
        cpu_offload=training.enable_cpu_offload,
    )
    for module in model.modules():  # torchtitan divides by tokens, not by ranks, which gloo does only for sums
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    if backend != "none":
        graphshard.compile(model, backend=backend)  # the one line that was added, in place of `apply_compile`
    return model


def build_model() -> Llama3Model:
    """torchtitan's debug model with fewer layers, on the meta device."""
    config = llama3_configs["debugmodel"](attn_backend="varlen")
    config.layers = config.layers[:LAYERS]
    normal = {"weight": partial(nn.init.trunc_normal_, std=0.02)}
    for layer in config.layers:  # its attention over several documents is CUDA's: want the one that runs anywhere
        layer.attention = make_gqa_config(
            dim=config.dim,
            n_heads=16,
            wqkv_param_init=normal,
            wo_param_init=normal,
            inner_attention=ScaledDotProductAttention.Config(),
            rope=layer.attention.rope,
        )
    with torch.device("meta"):
        return config.build()


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Trains; returns this rank's losses."""
    args = arguments(__doc__, argv)
    training = TrainingConfig(mixed_precision_param="bfloat16")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = text(rank, world_size)

    model = parallelize(build_model(), init_device_mesh("cpu", (world_size,)), training, args.backend)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-4, betas=(0.9, 0.95), weight_decay=0.1)

    first = 0
    if args.resume:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
        dcp.load(state, checkpoint_id=args.checkpoint)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        first = state["step"]

    losses = []
    for step in range(first, args.steps):
        tokens, targets = batches.draw(step, 0)
        logits = model(tokens)
        # torchtitan has switched FSDP2's division of gradients off: the loss is divided by the tokens of all ranks
        total = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
        loss = total / (targets.numel() * world_size)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(say(rank, step, total.detach() / targets.numel()))
        if args.checkpoint is not None and step + 1 == args.save_after:
            model_state, optimizer_state = get_state_dict(model, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state, "step": step + 1}
            dcp.save(state, checkpoint_id=args.checkpoint)
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        main()
    finally:
        dist.destroy_process_group()
