"""Models of blocks of one class that are not alike; nothing here knows of graphshard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import models
import torch
from torch import Tensor, nn
from twin_models import Asking, Block, Collecting, Importing, Stack


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


class OfferedToo(Asking):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * scale + self.collector.found["scale"][0]


class OfferingToo(Collecting):
    """Its blocks find there what all of them but one are called with."""

    def __init__(self) -> None:
        super().__init__("scale", block=OfferedToo)

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        scales = self.collector.found["scale"]
        if not scales:
            scales.append(x.detach().sigmoid())
        out: Tensor = block(x, scales[0].square() if block is self.blocks[3] else scales[0])
        return out


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


class Drawn(Stack):
    """Two blocks that look alike and are traced otherwise, and have no twins; then blocks that are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.drawing = nn.ModuleList(map(Drawing, range(3)))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.drawing:  # the first is called with what needs no gradient
            x = block(x)
        return super().forward(x)


class Three(nn.Module):
    """So few blocks that none has a twin: the first is called with what needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, range(3)))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


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
    "a new dict of what they are called with": OfferingToo,
    "a buffer read elsewhere": ReadAbove,
    "by what they are": KnowsItself,
    "by which tensor they have": Picked,
    "what buffers say": lambda: Stack(Tagged),
    "empty cells": lambda: Stack(Importing),
}
