"""Draws the pictures of the docs anew, from real steps of the demo's model on 2 CPU ranks: `make pictures`.

torchrun --standalone --nproc-per-node 2 -m docs.tools.pictures FOLDER
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.demo.model import Decoder, ModelConfig
from graphshard.demo.text import Batches

# File: the plan that it shows.
PICTURES = {"timeline.svg": "auto", "timeline-fsdp2.svg": "fsdp2"}
HARDWARE = "h100"
BATCH, LAYERS = 8, 2  # half of the demo's layers: a smaller picture


def draw(path: Path, plan: str) -> None:
    """One forward and backward; rank 0 writes its picture."""
    torch.manual_seed(0)
    config = ModelConfig(n_layers=LAYERS)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = graphshard.compile(Decoder(config), mesh, backend="aot_eager", plan=plan, hardware=HARDWARE)
    batches = Batches(dist.get_rank(), dist.get_world_size(), BATCH, config.max_seq_len)
    model(*batches.draw(0, 0)).backward()
    if dist.get_rank() == 0:
        graphshard.explain(model).save(path)


def main() -> None:
    """Draws all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    dist.init_process_group("gloo")
    try:
        for name, plan in PICTURES.items():
            draw(folder / name, plan)
    finally:
        gc.collect()  # sharded models are reference cycles that hold process groups
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
