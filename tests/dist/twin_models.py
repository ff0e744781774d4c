"""Models of blocks that are alike; nothing here knows of graphshard."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import models
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(models.DIM)
        self.linear = nn.Linear(models.DIM, models.DIM)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = torch.relu(self.linear(self.norm(x)))
        return x + hidden


class Stack(nn.Module):
    """A layer, so that blocks are called with what needs a gradient, and blocks."""

    def __init__(self, block: Callable[[int], nn.Module] = Block, count: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(models.DIM, models.DIM)
        self.blocks = nn.ModuleList(block(number) for number in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.through(block, x)
        return x

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = block(x)
        return out


class Checkpointed(Stack):
    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(block, x, use_reentrant=False)
        return out


class ChecksInside(Block):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


class Dropout(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.2, self.training)


class Normalized(Block):
    """Its buffers are written in forward."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.batch = nn.BatchNorm1d(models.DIM)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.batch(super().forward(x))
        return out


class Talkative(Block):
    """Takes and returns what is no tensor, too."""

    def forward(  # type: ignore[override]
        self, x: Tensor, rows: int, size: torch.Size, scale: Tensor | None = None, *, kind: str = ""
    ) -> Any:
        y = super().forward(x).reshape(rows, *size)
        return y if scale is None else y * scale, None, y.detach().sum() * len(kind)


class Listening(Stack):
    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        out, _, total = block(x, x.shape[0], x.shape[1:], x.detach().sigmoid(), kind="mean")
        return out / (1 + total.abs())


class Branching(Block):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.cond(x.sum() > 0, lambda t: t * 0.5, lambda t: t * 0.25, (super().forward(x),))
        return out


class Twice(Stack):
    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        return super().through(block, super().through(block, x))


class Remembering(Stack):
    """Changes itself: its blocks do not."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


class Mixing(Block):
    def forward(self, x: Tensor, first: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + 0.5 * first.detach()


class Reusing(Stack):
    """Its first block gets one tensor twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.first(x)
        for block in self.blocks:
            x = block(x, first)
        return x


class Handing(Block):
    """Returns what it is called with, too."""

    def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
        return mask, super().forward(x) * mask, None


class Handed(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x, given = self.first(x), x.detach().sigmoid()
        mask = given
        for block in self.blocks:
            mask, x, _ = block(x, mask)
        return x if mask is given else x.exp()


class Collector:
    found: Any = None


class Asking(Block):
    """Looks whether what it makes is collected, as classes of transformers do."""

    collector: Collector

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if "states" in self.collector.found:
            self.collector.found["states"].append(x.detach())
        return x


class Collecting(Stack):
    """Makes a dict for what is collected, and puts it where its blocks find it."""

    def __init__(self, *wanted: str, block: Callable[[int], nn.Module] = Asking) -> None:
        super().__init__(block)
        self.collector = Collector()
        self.wanted = wanted
        for member in self.blocks:
            member.collector = self.collector

    def forward(self, x: Tensor) -> Tensor:
        named = OrderedDict(x=x)
        self.collector.found = found = {name: [] for name in self.wanted}
        x = super().forward(named["x"])
        self.collector.found = None
        return x + sum((state.mean() for states in found.values() for state in states), torch.zeros(()))


def signed_zero(number: int) -> nn.Module:
    block = Signed(number)
    block.zero = 0.0 if number < 3 else -0.0
    return block


class Signed(Block):
    zero: float

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor(0.5).copysign(torch.tensor(self.zero))


class Importing(Block):
    """Has a function whose cell is empty."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        try:
            raise ImportError
        except ImportError as error:  # noqa: F841 - an empty cell is wanted
            self.act = lambda x: torch.tanh(x) if number >= 0 else error  # noqa: F821

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(super().forward(x))
        return out


def wrapped() -> nn.Module:
    return Stack(lambda number: checkpoint_wrapper(Block(number)))


ALIKE: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "plain": (Stack, 3),
    "checkpointed": (Checkpointed, 3),
    "checkpointed, and inside": (lambda: Checkpointed(ChecksInside), 3),
    "wrapped in checkpoints": (wrapped, 3),
    "dropout": (lambda: Stack(Dropout), 3),
    "buffers": (lambda: Stack(Normalized), 3),
    "numbers, sizes, texts, None": (lambda: Listening(Talkative), 3),
    "graphs inside": (lambda: Stack(Branching), 3),
    "used twice": (Twice, 7),
    "a model that changes itself": (Remembering, 3),
    "one tensor for two at first": (lambda: Reusing(Mixing), 2),
    "returning what they are called with": (lambda: Handed(Handing), 3),
    "a new dict that they look into": (lambda: Collecting("others"), 3),
    "zeros of two signs": (lambda: Stack(signed_zero), 1),
}
