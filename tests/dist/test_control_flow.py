"""Parameters that are read in branches (`torch.cond`) and bodies of loops of torch's: ranks may take others."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from test_models import INDUCTOR
from test_training import BITWISE
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._higher_order_ops.map import map as torch_map
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard.testing import TrainingRun, Ulps, WorkerPool, training_test

pytestmark = pytest.mark.row("X9")

DIM = models.DIM


class Choosing(nn.Module):
    """Each branch has a layer of its own, and both have one that the block uses around them, too."""

    def __init__(self) -> None:
        super().__init__()
        self.around, self.a, self.b = (nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.around(x))
        out: Tensor = torch.cond(x.sum() > 0, self._first, self._second, (y,))
        return x + out

    def _first(self, y: Tensor) -> Tensor:
        return self.a(y) + self.around(y) * 0.5

    def _second(self, y: Tensor) -> Tensor:
        return self.b(y).sin() - self.around(y)


class Nested(Choosing):
    def _first(self, y: Tensor) -> Tensor:
        out: Tensor = torch.cond(y[0, 0] > 0, self._inner, self._second, (y,))
        return out * 2

    def _inner(self, y: Tensor) -> Tensor:
        return self.a(y).cos()


class Mapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = torch_map(lambda row: torch.tanh(self.linear(row)), x)
        return x + rows


class Looping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        turns = (x[0, 0] > 0).long() * 2 + 1
        _, out = torch.while_loop(lambda n, y: n > 0, lambda n, y: (n - 1, torch.tanh(self.linear(y))), (turns, x))
        found: Tensor = out
        return found


class Checkpointing(Choosing):
    def _first(self, y: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.a, y, use_reentrant=False)
        return out


class Placing(nn.Module):
    """Puts parts of an image into their places in a text, whose number it checks, between equal blocks, as models of
    images and text do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(6))

    def forward(self, text: Tensor, places: Tensor, parts: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            text = text + torch.tanh(block(text))
            if i == 2:
                mask = places.unsqueeze(-1).expand_as(text)
                torch._check_tensor_all(mask.sum() == parts.numel())
                text = text.masked_scatter(mask, parts)
        return text


class Replacing(nn.Module):
    """Puts a parameter of its own where a mask says, as masked autoencoders do: its gradient is of as many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.token = nn.Linear(DIM, DIM), nn.Parameter(torch.randn(DIM))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = (x + torch.tanh(self.linear(x))).clone()
        x[mask] = self.token
        return x


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Replacing() for _ in range(5))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x


class Blocks(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def features(step: int, rank: int) -> Tensor:
    """Of another sign on each rank, and of another number of rows."""
    x, *_ = models.features(step, rank)
    return x[: len(x) - (step + rank) % 2].abs() * (-1) ** (step + rank)


@pytest.mark.parametrize("kind", [Choosing, Nested, Mapping])
@training_test(tolerance=BITWISE)
def test_ranks_take_other_branches_and_turns(run: TrainingRun, kind: type[nn.Module]) -> None:
    model = run.shard(Blocks(kind))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.train(model, optimizer, lambda model, run, step: model(features(step, run.rank)).square().mean(), steps=4)


@training_test(tolerance=BITWISE, train=False)
def test_loops_without_gradients_take_other_turns(run: TrainingRun) -> None:
    model = run.shard(Blocks(Looping)).requires_grad_(False)
    for step in range(3):
        run.note("out", model(features(step, run.rank)))


@training_test(
    backends=("inductor",),
    tolerance=Ulps(64, "Inductor fuses pointwise chains and sums in vector lanes", atol=2e-6),
)
def test_branches_under_inductor(run: TrainingRun) -> None:
    model = run.shard(Blocks(Choosing))
    loss = model(features(0, run.rank)).square().mean()
    loss.backward()
    run.observe(loss, model)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="Dynamo of torch 2.11 fails: PendingUnbackedSymbolNotFound")
@training_test(backends=("inductor",), tolerance=INDUCTOR)
def test_number_that_a_forward_checks_breaks_no_graph(run: TrainingRun) -> None:
    model: Any = run.shard(Placing(), units=[nn.Linear])
    places = torch.zeros(2, 5, dtype=torch.bool)
    places[0, : run.rank + 1] = True
    with dynamo_config.patch(capture_scalar_outputs=True):
        for step in range(2):
            text = torch.randn(2, 5, DIM, generator=models.generator(step, run.rank))
            loss = model(text, places, text[1, : run.rank + 1]).square().mean()
            loss.backward()
            run.observe(loss, model)
        with pytest.raises(RuntimeError, match="Runtime assertion failed" if not run.is_reference else "") as raised:
            model(text, places, text[1, : run.rank])
    run.note("refused", type(raised.value).__name__)
    assert run.is_reference or (graphshard.report(model).regions, graphshard.report(model).traced_once) == (2, (10, 2))


def place_tokens(run: TrainingRun) -> None:
    """Batches of two sizes; a rank has none to place in the first."""
    model: Any = run.shard(Masked(), units=[Replacing])
    for step, rows in enumerate((4, 4, 5)):
        g = models.generator(step, run.rank)
        x, mask = torch.randn(rows, 3, DIM, generator=g), torch.rand(rows, 3, generator=g) > 0.5
        loss = model(x, mask & bool(step + run.rank)).square().mean()
        loss.backward()
        run.observe(loss, model)
    assert run.is_reference or graphshard.report(model).regions == 2


@training_test(tolerance=BITWISE)
def test_gradients_of_as_many_rows_as_a_mask_has_break_no_graph(run: TrainingRun) -> None:
    place_tokens(run)
    assert run.is_reference or graphshard.report(run.models[0]).traced_once == (8, 2)


@training_test(backends=("inductor",), tolerance=INDUCTOR)
def test_gradients_of_as_many_rows_as_a_mask_has_under_inductor(run: TrainingRun) -> None:
    place_tokens(run)


def reads_that_cannot_move() -> None:
    model: Any = graphshard.compile(Blocks(Checkpointing), init_device_mesh("cpu", (2,)), backend="aot_eager")
    with pytest.raises(graphshard.UnsupportedModel, match="want no checkpoint there"):
        model(features(0, 0))


def test_reads_that_cannot_move_are_refused(two_ranks: WorkerPool) -> None:
    two_ranks.run(reads_that_cannot_move)
