"""Models of blocks that are alike until one of them changes; nothing here knows of graphshard."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import models
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twin_models import Block, Stack
from twin_others import Scaled


class Acting(Block):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.act, self.scale = nn.Tanh(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(super().forward(x)) * self.scale
        return F.dropout(out, 0.2, self.training)


class Shifted(Block):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.register_buffer("shift", None)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if self.shift is None else out + self.shift


class Rotation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(models.DIM))


class Rotating(Block):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.rotation = Rotation()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rotation.scale * super().forward(x)
        return out


class Holding(Acting):
    """The first holds a tensor that is no buffer."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.register_buffer("mask", torch.ones(models.DIM))
        self.held = None if number else [torch.ones(1)]


def lose_mask_or_scale(block: Any) -> None:
    if block.held:
        del block.mask
    else:
        block.scale = 0.5


def share_a_scale() -> nn.Module:
    scale = torch.ones(models.DIM)
    return Stack(lambda number: Scaled(number, scale))


def halved(module: nn.Module, _: object, output: Tensor) -> Tensor:
    return output / 2


def replace_rotation(block: Any) -> None:
    block.rotation = copy.deepcopy(block.rotation)
    block.rotation.scale.fill_(0.5)


CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], None]]] = {
    "frozen": (Stack, lambda block: block.requires_grad_(False)),
    "for evaluation": (lambda: Stack(Acting), lambda block: block.eval()),
    "hook": (Stack, lambda block: block.register_forward_hook(halved)),
    "attribute": (lambda: Stack(Acting), lambda block: setattr(block, "scale", 0.5)),
    "method": (lambda: Stack(Acting), lambda block: setattr(block.act, "forward", torch.sin)),
    "module": (lambda: Stack(Acting), lambda block: setattr(block, "act", nn.Sigmoid())),
    "class": (lambda: Stack(Acting), lambda block: setattr(block.act, "__class__", nn.Sigmoid)),
    "buffer": (lambda: Stack(Scaled), lambda block: setattr(block, "scale", torch.full((models.DIM,), 0.5))),
    "shared buffer": (share_a_scale, lambda block: setattr(block, "scale", torch.full((models.DIM,), 0.5))),
    "module with a buffer": (lambda: Stack(Rotating), replace_rotation),
    "buffer of one that holds a tensor": (lambda: Stack(Holding), lose_mask_or_scale),
    "buffer where none was": (lambda: Stack(Shifted), lambda block: setattr(block, "shift", torch.ones(models.DIM))),
}
