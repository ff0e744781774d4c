"""The examples of README.md and docs/*.md run as they stand there, on two ranks."""

from __future__ import annotations

import builtins
import gc
import linecache
import sys
import types
from contextlib import chdir
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from docs.tools.examples import Example, examples, pages
from graphshard.testing import WorkerPool

ENOUGH_PAGES = 6


class Decoder(nn.Module):
    """What examples call so: blocks, tokens and targets in, a loss out."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(config.dim, config.dim), nn.ReLU()) for _ in range(2))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        logits = x @ self.embedding.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class AsGraphs:
    """graphshard, but for the default of `backend`: with Inductor, the pages would take minutes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(graphshard, name)

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        return graphshard.compile(*args, **{"backend": "aot_eager", **kwargs})


def importing(name: str, *args: Any) -> Any:
    """`import` in an example."""
    return AsGraphs() if name == "graphshard" else __import__(name, *args)


def prepared() -> dict[str, Any]:
    """What pages take for granted: a model that has trained a step."""
    config = SimpleNamespace(vocab_size=32, dim=16)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = AsGraphs().compile(Decoder(config), mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, config.vocab_size, (3, 2, 8))
    batches = [(one, one.roll(-1, 1)) for one in tokens]

    def train_step() -> None:
        model(*batches[0]).backward()
        optimizer.step()
        optimizer.zero_grad()

    train_step()
    names = {"torch": torch, "dist": dist, "graphshard": AsGraphs(), "init_device_mesh": init_device_mesh}
    names |= {"dcp": checkpoint, "device": "cpu", "folder": "checkpoint", "mesh": mesh, "config": config}
    names |= {"model": model, "optimizer": optimizer, "batches": batches, "train_step": train_step}
    return names | {"Decoder": Decoder, "__builtins__": {**vars(builtins), "__import__": importing}}


def run_pages(found: dict[str, list[Example]], folder: str) -> None:
    """Runs the blocks of each page in a module of its own; errors point at the page's lines."""
    names = prepared()
    with chdir(folder):
        for page, blocks in found.items():
            module = types.ModuleType(f"example_{page.partition('.')[0]}")
            vars(module).update(names)
            sys.modules[module.__name__] = module  # Dynamo looks up the globals of what it traces
            for block in blocks:
                code = "\n" * (block.line - 1) + block.code
                linecache.cache[page] = (len(code), None, code.splitlines(keepends=True), page)
                exec(compile(code, page, "exec"), vars(module))
                dist.barrier()  # the next block may read what one rank has written
            del sys.modules[module.__name__]
            vars(module).clear()
    names.clear()
    gc.collect()


def test_examples_run(two_ranks: WorkerPool, tmp_path: Path) -> None:
    found = {page.name: [one for one in examples(page) if one.why_not is None] for page in pages()}
    found = {name: blocks for name, blocks in found.items() if blocks}
    assert len(found) >= ENOUGH_PAGES
    two_ranks.run(run_pages, found, str(tmp_path), timeout_s=250.0)


def test_an_example_that_fails_is_named_by_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n\n<!-- not run: no GPU -->\n```python\nnothing\n```\n\n```python\nx = 1\nx + nothing\n```\n"
    )
    left_out, block = examples(page)
    assert (left_out.why_not, block.why_not) == ("no GPU", None)
    with pytest.raises(NameError) as raised:
        exec(compile("\n" * (block.line - 1) + block.code, "page.md", "exec"), {})
    assert raised.tb.tb_next is not None and raised.tb.tb_next.tb_lineno == 10
