"""Graphs that break on one rank in further places than on all: its parts follow the legs of the others' calls."""

from __future__ import annotations

import copy
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from test_contract import Blocks, break_in, equal, features, impatient, trained
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.errors import RanksDiffer
from graphshard.testing import WorkerPool
from graphshard.testing.failures import RankFailed


@impatient()
def broken_beside_others(who: int, options: dict[str, Any]) -> None:
    """On all ranks, graphs break in the second block; on one of them, later, in those around it, too."""
    rank = dist.get_rank()

    def prepare(model: Any, step: int) -> None:
        break_in(model, (0, 1, 2) if rank == who and step >= 1 else (1,))
        if step == 0:  # other code than that of the block in which all break: compiled when it breaks
            model.layers[2].at_break = torch.compiler.disable(lambda: None)

    got, want, report = trained(Blocks, lambda step: features(step, 4), prepare, **options)
    equal(got, want)
    assert any("graph breaks leave parts" in note for note in report.notes) == (rank == who)


@pytest.mark.parametrize(
    ("who", "options"),
    [(0, {"plan": "auto"}), (1, {"regions": "unit"})],
)
def test_graph_breaks_on_one_rank_beside_those_of_all(two_ranks: WorkerPool, who: int, options: dict[str, Any]) -> None:
    two_ranks.run(broken_beside_others, who, options)


def broken_otherwise_at_once(who: int) -> None:
    rank = dist.get_rank()
    with pytest.raises(RanksDiffer, match=r"leg 2 of the forward of 'root': ranks differ in the units .* graph breaks"):
        trained(
            Blocks, lambda step: features(step, 4), lambda model, _: break_in(model, (0, 1) if rank == who else (1,))
        )


@pytest.mark.parametrize("who", [0, 1])
def test_other_breaks_in_the_first_call_are_told_before_parts_are_compiled(two_ranks: WorkerPool, who: int) -> None:
    two_ranks.run(broken_otherwise_at_once, who)


def broken_alike_later(later: tuple[int, ...]) -> None:
    got, want, report = trained(
        Blocks, lambda step: features(step, 4), lambda model, step: break_in(model, (1,) if step < 2 else later)
    )
    equal(got, want)
    assert not any("graph breaks leave parts" in note for note in report.notes)


@pytest.mark.parametrize("later", [(1, 2), (), (2,)])
def test_graph_breaks_that_come_and_go_on_all_ranks_are_theirs(two_ranks: WorkerPool, later: tuple[int, ...]) -> None:
    two_ranks.run(broken_alike_later, later)


@impatient()
def broken_no_more(who: int, whole: bool) -> None:
    """`whole`: units are gathered and reduced as a whole, whatever ranks use of them."""

    def prepare(model: Any, step: int) -> None:
        break_in(model, () if dist.get_rank() == who and step >= 1 else (1,))
        for unit in (model, *model.layers) if whole and step == 0 else ():
            unit.set_reduce_scatter_unused_params(True)

    got, want, _ = trained(Blocks, lambda step: features(step, 4), prepare)
    equal(got, want)


@pytest.mark.parametrize("who", [0, 1])
def test_graph_breaks_that_one_rank_has_no_more_are_told(two_ranks: WorkerPool, who: int) -> None:
    said = rf"on rank {who} one graph goes on to layers\.1\.down.* set_reduce_scatter_unused_params\(True\)"
    with pytest.raises(RankFailed, match=said):
        two_ranks.run(broken_no_more, who, False)


@pytest.mark.parametrize("who", [0, 1])
def test_graph_breaks_that_one_rank_has_no_more_between_whole_units(two_ranks: WorkerPool, who: int) -> None:
    two_ranks.run(broken_no_more, who, True)


class Torn(nn.Module):
    """A block of two parts on all ranks, and of three where `tears`."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.middle, self.down = (nn.Linear(models.DIM, models.DIM) for _ in range(3))
        self.tears = False

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x)
        torch._dynamo.graph_break()
        inner = self.middle(torch.relu(inner))
        if self.tears:
            torch._dynamo.graph_break()
        return x + self.down(torch.relu(inner))


def called_again() -> nn.Module:
    first, second = Torn(), Torn()
    return nn.Sequential(nn.LayerNorm(models.DIM), first, second, first)


@impatient()
def torn(who: int) -> None:
    def prepare(model: Any, step: int) -> None:
        for block in model[1:]:
            block.tears = dist.get_rank() == who and step >= 1

    got, want, report = trained(called_again, lambda step: features(step, 4), prepare)
    equal(got, want)
    assert any("graph breaks leave parts" in note for note in report.notes) == (dist.get_rank() == who)


@pytest.mark.parametrize("who", [0, 1])
def test_units_that_are_in_parts_on_all_ranks_come_further_apart_on_one(two_ranks: WorkerPool, who: int) -> None:
    two_ranks.run(torn, who)


class Scaled(Blocks):
    """Its root is in parts on all ranks; where `leaves_out`, a part comes apart and leaves out a parameter of it."""

    def __init__(self) -> None:
        super().__init__(2)
        self.scale = nn.Parameter(torch.randn(models.DIM))
        self.leaves_out = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](self.embed(x))
        torch._dynamo.graph_break()
        x = self.layers[1](x)
        if self.leaves_out:
            torch._dynamo.graph_break()
        else:
            x = x * self.scale
        out: Tensor = self.norm(x)
        return out


@impatient()
def left_out(who: int) -> None:
    torch.manual_seed(0)
    plain: Any = Scaled()
    model: Any = graphshard.compile(copy.deepcopy(plain), init_device_mesh("cpu", (2,)), backend="aot_eager")
    for step in range(3):
        plain.leaves_out = model.leaves_out = step > 0 and dist.get_rank() == who
        inputs = features(step, 4)
        for each in (plain, model):
            each.zero_grad()
            each(inputs).square().mean().backward()
        for want, got in zip(plain.parameters(), model.parameters(), strict=True):
            grad = torch.zeros_like(want) if want.grad is None else want.grad
            dist.all_reduce(grad, dist.ReduceOp.SUM)
            torch.testing.assert_close(got.grad.full_tensor(), grad / 2)


@pytest.mark.parametrize("who", [0, 1])
def test_parts_that_leave_out_a_parameter_give_it_zeros(two_ranks: WorkerPool, who: int) -> None:
    two_ranks.run(left_out, who)
