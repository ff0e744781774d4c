"""Models of blocks that are alike, and of some that are not; nothing here knows of graphshard."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
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


# -- alike


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

    def forward(self, x: Tensor, rows: int, scale: Tensor | None = None, *, kind: str = "") -> Any:  # type: ignore[override]
        y = super().forward(x).reshape(rows, -1)
        return y if scale is None else y * scale, None, y.detach().sum() * len(kind)


class Listening(Stack):
    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        out, _, total = block(x, x.shape[0], x.detach().sigmoid(), kind="mean")
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


class Offered(Asking):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.collector.found["first"][0].detach()


class Offering(Collecting):
    """Its blocks find there, too, what the first of them is called with."""

    def __init__(self) -> None:
        super().__init__("first", block=Offered)

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        if not self.collector.found["first"]:
            self.collector.found["first"].append(x)
        return super().through(block, x)


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
    "numbers, texts, None": (lambda: Listening(Talkative), 3),
    "graphs inside": (lambda: Stack(Branching), 3),
    "used twice": (Twice, 7),
    "a model that changes itself": (Remembering, 3),
    "one tensor for two at first": (lambda: Reusing(Mixing), 2),
    "returning what they are called with": (lambda: Handed(Handing), 3),
    "a new dict that they look into": (lambda: Collecting("others"), 3),
    "zeros of two signs": (lambda: Stack(signed_zero), 1),
}


# -- not alike


class Numbered(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.number)


class Counting(Block):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


class Filling(Block):
    """Changes what it is called with: a list."""

    def forward(self, x: Tensor, sums: list[Tensor]) -> Tensor:  # type: ignore[override]
        sums[0] = sums[0] + x.detach().amax()
        return super().forward(x)


class Filled(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x, sums = self.first(x), [torch.zeros(())]
        for block in self.blocks:
            x = block(x, sums)
        return x + sums[0]


class Writing(Block):
    """Changes what it is called with: a tensor."""

    def forward(self, x: Tensor, total: Tensor) -> Tensor:  # type: ignore[override]
        total.add_(x.detach().sum())
        return super().forward(x)


class Written(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x, total = self.first(x), torch.zeros(())
        for block in self.blocks:
            x = block(x, total)
        return x + total


@dataclass
class Settings:
    scale: float = 1.0
    scales: tuple[float, ...] = ()
    all_scales: Sequence[float] = ()


class Set(Block):
    """Reads what the model sets before each block."""

    settings: Settings

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.settings.scale * sum(self.settings.all_scales)


class Setting(Stack):
    def __init__(self) -> None:
        super().__init__(Set)
        self.settings = Settings(all_scales=[0.5, 0.25])
        for block in self.blocks:
            block.settings = self.settings


class Adding(Set):
    """Adds to a list that the model has just made."""

    def forward(self, x: Tensor) -> Tensor:
        self.settings.all_scales.append(0.25)  # type: ignore[attr-defined]
        return super().forward(x)


class Renewing(Stack):
    def __init__(self) -> None:
        super().__init__(Adding)
        self.settings = Settings()
        for block in self.blocks:
            block.settings = self.settings

    def forward(self, x: Tensor) -> Tensor:
        self.settings.all_scales = []
        return super().forward(x) * len(self.settings.all_scales)


class SetsAttribute(Setting):
    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        self.settings.scale = 1.5 - self.settings.scale
        return super().through(block, x)


class SetsItem(Setting):
    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        self.settings.all_scales[0] = 1.5 - self.settings.all_scales[0]  # type: ignore[index]
        return super().through(block, x)


class Known(Block):
    known: list[nn.Module]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (0.5 if self in self.known else 1)


class KnowsItself(Stack):
    def __init__(self) -> None:
        super().__init__(Known)
        known = [self.blocks[2]]
        for block in self.blocks:
            block.known = known


class ReadAbove(Stack):
    """One block's buffer is the model's own, too."""

    def __init__(self) -> None:
        super().__init__(Scaled)
        self.register_buffer("scale", self.blocks[3].scale)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


class Scaled(Block):
    def __init__(self, number: int, scale: Tensor | None = None) -> None:
        super().__init__(number)
        self.register_buffer("scale", torch.ones(models.DIM) if scale is None else scale)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Picked(Stack):
    """A block whose buffer is the one that all blocks know does something else."""

    def __init__(self) -> None:
        known = SimpleNamespace()
        super().__init__(lambda number: Picking(number, known))
        known.scale = self.blocks[3].scale


class Picking(Scaled):
    def __init__(self, number: int, known: SimpleNamespace) -> None:
        super().__init__(number)
        self.known = known

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out / 2 if self.scale is self.known.scale else out


class Fading(Scaled):
    """Writes its buffer."""

    def forward(self, x: Tensor) -> Tensor:
        self.scale.mul_(0.5)
        return x + self.linear(x) + self.scale


class WithScale(Stack):
    """What it is called with may be a block's buffer."""

    def __init__(self) -> None:
        super().__init__(Fading)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().forward(x) * scale


class Drawing(Block):
    """Each trace of it has another number, which nothing but the trace shows."""

    drawn = 0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * _next_number()


@torch.compiler.assume_constant_result
def _next_number() -> int:
    Drawing.drawn += 1
    return Drawing.drawn


class Tagged(Block):
    """A buffer says how it is read."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.register_buffer("scale", torch.ones(models.DIM))
        self.scale.times = 1.0 + number  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale * self.scale.times  # type: ignore[union-attr]


OTHER: dict[str, Callable[[], nn.Module]] = {
    "numbers of their own": lambda: Stack(Numbered),
    "counting calls": lambda: Stack(Counting),
    "filling a list": lambda: Filled(Filling),
    "writing an argument": lambda: Written(Writing),
    "an attribute set between them": SetsAttribute,
    "an item set between them": SetsItem,
    "filling a list that is new": Renewing,
    "a new dict that they fill": lambda: Collecting("states"),
    "a new dict of what the first is called with": Offering,
    "a buffer read elsewhere": ReadAbove,
    "by what they are": KnowsItself,
    "by which tensor they have": Picked,
    "what buffers say": lambda: Stack(Tagged),
    "empty cells": lambda: Stack(Importing),
}
