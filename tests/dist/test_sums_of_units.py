"""An activation that several units use: backward sums its gradients unit by unit, as FSDP2 does."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from test_training import BITWISE
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from graphshard.testing import TrainingRun, training_test

DIM = models.DIM


class Cross(nn.Module):
    """Attends to its input, then to what all blocks share."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.breaks = breaks

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        key = self.key(shared)
        if self.breaks:
            torch._dynamo.graph_break()
        found = F.softmax(self.query(x) @ key.mT, dim=-1) @ self.value(shared)
        return x + self.out(found)


class EncoderDecoder(nn.Module):
    def __init__(self, blocks: int = 4, **options: Any) -> None:
        super().__init__()
        self.encoder = models.Mlp()
        self.blocks = nn.ModuleList(Cross(**options) for _ in range(blocks))

    def call(self, block: nn.Module, x: Tensor, shared: Tensor) -> Tensor:
        out: Tensor = block(x, shared)
        return out

    def forward(self, x: Tensor) -> Tensor:
        shared = self.encoder(x)
        x = x.flip(1)
        for block in self.blocks:
            x = self.call(block, x, shared)
        return x + shared


class FromShared(EncoderDecoder):
    """The first block gets one tensor twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = shared = self.encoder(x)
        for block in self.blocks:
            x = self.call(block, x, shared)
        return x


class Checkpointed(EncoderDecoder):
    def call(self, block: nn.Module, x: Tensor, shared: Tensor) -> Tensor:
        out: Tensor = checkpoint(block, x, shared, use_reentrant=False)
        return out


class ByName(EncoderDecoder):
    def call(self, block: nn.Module, x: Tensor, shared: Tensor) -> Tensor:
        out: Tensor = block(shared=shared, x=x)
        return out


class Skips(nn.Module):
    """Down and up again, each block on the way up with what its own on the way down was given."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(models.Mlp() for _ in range(3))
        self.up = nn.ModuleList(models.Mlp() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            kept.append(x)
            x = block(x)
        for block in self.up:
            x = block(x + kept.pop())
        return x


class Normed(Cross):
    """Its only use of what is shared brings two gradients: of a norm that torch computes of parts."""

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        return x + self.out(F.rms_norm(shared, (DIM,)))


class Halves(nn.Module):
    """Units in a unit without parameters of its own, in which FSDP2 sees no unit."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = models.Mlp(), models.Mlp()

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        return x + self.left(shared) * self.right(shared)


class Built(EncoderDecoder):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(block() for _ in range(3))


MODELS = {
    "norms of parts": lambda: Built(Normed),
    "units without parameters": lambda: Built(Halves),
    "cross": EncoderDecoder,
    "one block": lambda: EncoderDecoder(1),
    "from shared": FromShared,
    "checkpointed": Checkpointed,
    "by name": ByName,
    "graph breaks": lambda: EncoderDecoder(breaks=True),
    "skips": Skips,
}


BF16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
CASES = [*((case, {}) for case in MODELS), ("cross", BF16), ("graph breaks", BF16)]


@pytest.mark.parametrize(("case", "options"), CASES)
@training_test(tolerance=BITWISE)
def test_gradients_are_summed_unit_by_unit(run: TrainingRun, case: str, options: dict[str, Any]) -> None:
    build: Any = MODELS[case]()
    units = [name for name, module in build.named_modules() if isinstance(module, (Cross, Halves, models.Mlp))]
    model = run.shard(build, units=units, **options)
    for index in range(2):
        loss = model(*models.sequences(index, run.rank)).square().mean()
        loss.backward()
        run.observe(loss, model)
        model.zero_grad()
