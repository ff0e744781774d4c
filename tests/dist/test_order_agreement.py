"""Ranks that use regions in other orders than each other are told so, and what they have mixed."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from test_across_regions import BITWISE, LAYERS, Skipping, loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.errors import RanksDiffer
from graphshard.testing import TrainingRun, WorkerPool, training_test


def rank_runs_layers_backwards() -> str:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    model = graphshard.compile(Skipping(LAYERS), mesh, backend="aot_eager", regions="unit")
    if torch.distributed.get_rank() == 1:
        model.order = (0, 2, 1)
    x = models.tokens(0, 0)
    with torch.no_grad(), pytest.raises(RanksDiffer) as error:
        model(*x)
    return str(error.value)


def test_ranks_with_other_orders_raise_on_both_sides(two_ranks: WorkerPool) -> None:
    texts = two_ranks.run(rank_runs_layers_backwards)
    for rank, (text, (mine, theirs)) in enumerate(zip(texts, ((1, 2), (2, 1)), strict=True)):
        assert "of the inference of 'root': ranks differ in the units that they use, in order" in text
        assert f"got 'layers.{mine}: " in text
        assert f"on rank {rank} and 'layers.{theirs}: " in text


def units_used_twice_in_other_orders() -> str:
    torch.manual_seed(0)
    model = graphshard.compile(Skipping(LAYERS), init_device_mesh("cpu", (2,)), backend="aot_eager", regions="unit")
    x = models.tokens(0, 0)
    with torch.no_grad():
        model.order = (0, 1, 0, 1)
        model(*x)
        model.order = (0, 1, 1, 0) if torch.distributed.get_rank() else (0, 0, 1, 1)
        with pytest.raises(RanksDiffer, match="do not step on its gradients") as error:
            model(*x)
    return str(error.value)


def test_units_that_are_used_twice_in_other_orders_raise_on_both_sides(two_ranks: WorkerPool) -> None:
    for text in two_ranks.run(units_used_twice_in_other_orders):
        assert "ranks differ in the units that they use, in order" in text


class Watched(nn.Module):
    """Looks at its scale between its layers, where told to."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(models.DIM))
        self.layers = nn.ModuleList(models.Mlp() for _ in range(3))
        self.seen: list[float] = []
        self.looks = False

    @torch.compiler.disable
    def look(self) -> None:
        if self.looks:
            with torch.no_grad():
                self.seen.append(float(self.scale.sum()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x * self.scale)
        torch._dynamo.graph_break()
        x = self.layers[1](x)
        self.look()
        return self.layers[2](x) * self.scale


def one_rank_looks() -> list[float]:
    torch.manual_seed(0)
    model = graphshard.compile(
        Watched(), init_device_mesh("cpu", (2,)), backend="aot_eager", regions="unit", deadline_s=8
    )
    for step in range(3):
        model.looks = step == 2 and torch.distributed.get_rank() == 0
        loss_of(model, models.features(step, torch.distributed.get_rank())).backward()
    return model.seen


def test_one_rank_may_look_at_a_gathered_parameter_between_regions(two_ranks: WorkerPool) -> None:
    assert two_ranks.run(one_rank_looks) == [[models.DIM], []]


class Scaling(models.Scale):
    """Scales between its layers by what is frozen: in a graph, or around them where told to."""

    def __init__(self) -> None:
        super().__init__(trained=False)
        self.layers = nn.ModuleList(models.Mlp() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        torch._dynamo.graph_break()
        x = self.scaled(x)
        torch._dynamo.graph_break()
        out: Tensor = self.layers[1](x)
        return out


@training_test(tolerance=BITWISE, allow_eager=("",))
def test_nobody_waits_for_the_order_of_a_rank_that_has_come_apart(run: TrainingRun) -> None:
    model: Any = run.shard(Scaling(), units=[], **({} if run.is_reference else {"deadline_s": 8}))
    for step in range(6):
        model.is_plain = step > 1 and run.rank == 0
        x = torch.randn(2 + (step > 2) * (1 + run.rank), models.DIM)
        loss = loss_of(model, (x,))
        loss.backward()
        run.observe(loss, model)
        model.zero_grad()


class TwoHeads(nn.Module):
    """Each rank takes the loss of its own head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = models.Mlp()
        self.heads = nn.ModuleList(models.Mlp() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        heads = [head(self.body(x)) for head in self.heads]
        return heads[torch.distributed.get_rank()]


def backwards_of_other_heads() -> str:
    torch.manual_seed(0)
    model = graphshard.compile(TwoHeads(), init_device_mesh("cpu", (2,)), backend="aot_eager", regions="unit")
    with pytest.raises(RanksDiffer) as error:
        for _ in range(2):  # what the first has shown is followed by the second
            loss_of(model, models.features(0, 0)).backward()
    return str(error.value)


def test_ranks_with_backwards_of_other_regions_raise_on_both_sides(two_ranks: WorkerPool) -> None:
    for rank, text in enumerate(two_ranks.run(backwards_of_other_heads)):
        assert "backward of 'root': ranks differ in the order of their regions" in text
        assert f"got 'backward of heads.{rank}' on rank {rank}" in text
