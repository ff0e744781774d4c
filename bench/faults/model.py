"""A small model in which things can go wrong: blocks, two experts, and a point in its middle that calls back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

BLOCKS = 2
# FQNs of units or parameters in an error.
UNIT = r"\b(?:blocks\.\d|experts\.\d|head|inner|root)\b"

# Called in every rank's process with "forward", "backward" or "compilation".
on_point: list[Callable[[str], None]] = []


@torch.library.custom_op("graphshard_faults::point", mutates_args=())
def point(x: Tensor, where: str) -> Tensor:
    for call in on_point:
        call(where)
    return x.clone()


@point.register_fake
def _(x: Tensor, where: str) -> Tensor:
    for call in on_point:
        call("compilation")
    return torch.empty_like(x)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return point(grad, "backward"), None


point.register_autograd(_backward)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def leave_graph(x: Tensor) -> Tensor:
    return x


class FaultyBlock(nn.Module):
    """Two layers and a sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.inner(x)
        return x + self.outer(hidden.relu())  # type: ignore[no-any-return]


class FaultyModel(nn.Module):
    """Reads both experts for every input.

    Attributes:
        breaks: whether its graph breaks.
        is_in_parts: whether it breaks further on.
        salt: has no effect; code is compiled anew where it has changed.
        reads_last_expert: whether it does.
    """

    WIDTH: ClassVar[int] = 16

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.blocks = nn.ModuleList(FaultyBlock(width) for _ in range(BLOCKS))
        self.experts = nn.ModuleList(FaultyBlock(width) for _ in range(2))
        self.head = nn.Linear(width, width)
        self.breaks = self.is_in_parts = False
        self.salt = ""
        self.reads_last_expert = True

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.blocks
        x = first(self.inner(x))
        if self.salt.endswith("?"):
            x = x + 1
        x = point(x, "forward")
        if self.breaks:
            x = leave_graph(x)
        one, other = self.experts
        x = one(last(x))
        if self.is_in_parts:
            x = leave_graph(x)
        if self.reads_last_expert:
            x = other(x)
        return self.head(x)  # type: ignore[no-any-return]

    def sharded(self, mesh: DeviceMesh | None) -> FaultyModel:
        """Itself, annotated."""
        for unit in (*self.blocks, *self.experts):
            fully_shard(unit, mesh=mesh)
        fully_shard(self, mesh=mesh)
        return self
