"""Calls that use other parameters than the first: ranks gather and reduce alike, whoever takes them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import models
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

import graphshard
from graphshard.agree import consensus
from graphshard.api import engine_of
from graphshard.testing import WorkerPool

DIM = models.DIM
PATIENCE_S = 0.3


def features(step: int, rows: int) -> Tensor:
    return torch.randn(rows, DIM, generator=models.generator(step, dist.get_rank()))


class Experts(nn.Module):
    """Each rank may use another one."""

    def __init__(self, uses: tuple[int, ...]) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.experts = nn.ModuleList(models.Mlp() for _ in range(3))
        self.head = nn.Linear(DIM, DIM)
        self.uses = uses

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for number in self.uses:
            x = self.experts[number](x)
        out: Tensor = self.head(x)
        return out


def experts(uses: Callable[[int, int], tuple[int, ...]], steps: int, late: bool = False) -> None:
    """Trains where `uses(rank, step)` are the experts in use, beside the plain model on the same inputs."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain = Experts(uses(rank, 0)).double()
    model: Any = graphshard.compile(
        copy.deepcopy(plain), init_device_mesh("cpu", (world,)), units=["experts.0", "experts.1", "experts.2"],
        backend="aot_eager",
    )  # fmt: skip
    differed = False
    for step in range(steps):
        plain.uses = model.uses = uses(rank, step)
        used: list[Any] = [None] * world
        dist.all_gather_object(used, model.uses)
        differed = differed or len(set(used)) > 1
        inputs = features(step, 4).double()
        if late and rank == 1 and step:
            time.sleep(3 * PATIENCE_S)  # the others have given it up by then
        model(inputs).square().mean().backward()
        plain(inputs).square().mean().backward()
        for name, parameter in plain.named_parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            got = model.get_parameter(name).grad
            if not differed:
                assert (got is None) == (parameter.grad is None), f"{name} in step {step}"
            dist.all_reduce(grad)
            # Eager FSDP2 would hang. The plain model's sums over ranks are made in another order: one unit, 2e-16.
            got = torch.zeros_like(grad) if got is None else got.full_tensor()
            torch.testing.assert_close(got, grad / world, rtol=1e-12, atol=1e-15, msg=f"{name} in step {step}")
        assert all(shard.full is None for shard in engine_of(model).shards), f"step {step}"
        model.zero_grad()
        plain.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(model(inputs), plain(inputs), rtol=1e-12, atol=1e-15)


def impatient(uses: Callable[[int, int], tuple[int, ...]], steps: int, late: bool = False) -> None:
    with mock.patch.object(consensus, "PATIENCE_S", PATIENCE_S):
        experts(uses, steps, late)


def own_experts(rank: int, step: int) -> tuple[int, ...]:
    return (0, 1) if rank == 0 else (1, 2) if step < 2 else (0, 2)


def test_experts_that_a_rank_does_not_use_get_zeros_from_it(two_ranks: WorkerPool) -> None:
    two_ranks.run(experts, own_experts, 4)


def one_dies(rank: int, step: int) -> tuple[int, ...]:
    return (0, 1, 2) if rank == 0 or step < 1 else ((0, 1), (0, 1, 2), (1,), (0,))[step % 4]


def test_experts_that_one_rank_stops_using_get_zeros_from_it(two_ranks: WorkerPool) -> None:
    two_ranks.run(impatient, one_dies, 6)


def test_experts_that_two_of_four_ranks_stop_using_get_zeros_from_them(four_ranks: WorkerPool) -> None:
    four_ranks.run(impatient, some_die, 4)


def some_die(rank: int, step: int) -> tuple[int, ...]:
    return (0, 1, 2) if rank % 2 == 0 or step < 1 else (rank - 1, 2)


def same_on_all(rank: int, step: int) -> tuple[int, ...]:
    return ((0, 1, 2), (0,), (0, 2), (0,), (0,), (0,), (0, 1, 2), (1,))[step]


@pytest.mark.parametrize(("steps", "late"), [(8, False), (4, True)], ids=["in time", "late"])
def test_experts_that_all_ranks_stop_using_get_no_gradient(two_ranks: WorkerPool, steps: int, late: bool) -> None:
    two_ranks.run(impatient, same_on_all, steps, late)


def more_and_more(rank: int, step: int) -> tuple[int, ...]:
    return ((0,), (0, 1, 2), (0, 1) if rank else (0, 1, 2), (2,))[step]


def test_experts_that_all_ranks_begin_to_use_may_die_on_one(two_ranks: WorkerPool) -> None:
    two_ranks.run(impatient, more_and_more, 4)


def other_new_ones(rank: int, step: int) -> tuple[int, ...]:
    return (0,) if not step else (1 + rank,) if step == 1 else (0, 1 + rank)


def test_ranks_that_begin_to_use_other_experts_than_each_other_share_all(two_ranks: WorkerPool) -> None:
    two_ranks.run(impatient, other_new_ones, 4)


def wakes_alone() -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model: Any = graphshard.compile(
        Experts((0,)), init_device_mesh("cpu", (2,)), units=["experts.1", "experts.2"], backend="aot_eager"
    )
    model(features(0, 4)).mean().backward()
    model.uses = (0, 1)
    if rank == 0:  # the other rank has come to no call: it would stand in a collective
        with (
            mock.patch.object(engine_of(model).context.consensus, "deadline_s", 1.0),
            pytest.raises(
                graphshard.RanksDiffer, match=r"rank 0 waited 1 s for rank 1 to come to the forward of 'root'"
            ),
        ):
            model(features(0, 4))


def test_expert_that_one_rank_alone_begins_to_use_is_refused(two_ranks: WorkerPool) -> None:
    two_ranks.run(wakes_alone)


# -- several calls in a step


def several(steps: tuple[tuple[tuple[int, ...], ...], ...], at_once: bool) -> None:
    """Steps of calls; of each, how many experts rank 0, rank 1 use. At once: one backward; else they accumulate."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain = Experts(()).double()
    model: Any = graphshard.compile(
        copy.deepcopy(plain), init_device_mesh("cpu", (world,)), units=["experts.0", "experts.1", "experts.2"],
        backend="aot_eager",
    )  # fmt: skip
    with mock.patch.object(consensus, "PATIENCE_S", PATIENCE_S):
        for step, calls in enumerate(steps):
            losses: list[Tensor] = []
            for call, counts in enumerate(calls):
                plain.uses = model.uses = tuple(range(counts[rank]))
                inputs = features(10 * step + call, 4).double()
                model.set_requires_gradient_sync(at_once or call == len(calls) - 1)
                losses.append(model(inputs).square().mean())
                plain(inputs).square().mean().backward()
                if not at_once:
                    losses.pop().backward()
            if at_once:
                torch.stack(losses).sum().backward()
            for name, parameter in plain.named_parameters():
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(grad)
                got = model.get_parameter(name).grad
                got = torch.zeros_like(grad) if got is None else got.full_tensor()
                torch.testing.assert_close(got, grad / world, rtol=1e-12, atol=1e-15, msg=f"{name} in step {step}")
            model.zero_grad()
            plain.zero_grad()


@pytest.mark.parametrize(
    ("steps", "at_once"),
    [((((1, 2), (2, 1)), ((2, 3), (3, 1))), True), ((((3, 3), (3, 3)), ((1, 2), (2, 1)), ((3, 1), (2, 3))), False)],
    ids=["from the first step, in one backward", "later, accumulated"],
)
def test_ranks_that_use_other_experts_in_several_calls_train_on(
    two_ranks: WorkerPool, steps: tuple[tuple[tuple[int, ...], ...], ...], at_once: bool
) -> None:
    two_ranks.run(several, steps, at_once)


def test_experts_that_come_into_use_while_gradients_accumulate(two_ranks: WorkerPool) -> None:
    two_ranks.run(several, (((1, 1), (3, 3)), ((3, 1), (2, 3)), ((1, 3), (3, 3))), False)


# -- graph breaks on all ranks


class BrokenExperts(Experts):
    """No rank has one graph of it; a program serves all experts."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for number in self.uses:
            torch._dynamo.graph_break()
            x = self.experts[number](x)
        out: Tensor = self.head(x)
        return out


def in_parts(uses: dict[int, tuple[tuple[int, ...], ...]], options: dict[str, Any]) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain = BrokenExperts((0, 1, 2)).double()
    model: Any = graphshard.compile(
        copy.deepcopy(plain), init_device_mesh("cpu", (2,)), units=["experts.0", "experts.1", "experts.2"],
        backend="aot_eager", **options,
    )  # fmt: skip
    for step, own in enumerate(uses[rank]):
        model.uses = plain.uses = own
        inputs = features(step, 4).double()
        if uses[0][step] != uses[1][step]:
            what = rf"call {step + 1}, the forward of 'root': ranks differ in the units that they use"
            with pytest.raises(graphshard.RanksDiffer, match=what):
                model(inputs)
            return
        torch.testing.assert_close(model(inputs), plain(inputs), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("options", [{}, {"regions": "unit"}, {"plan": "fsdp2"}], ids=str)
def test_ranks_that_use_other_equal_modules_between_graph_breaks_are_told(
    two_ranks: WorkerPool, options: dict[str, Any]
) -> None:
    two_ranks.run(in_parts, {0: ((0, 1, 2), (0, 1), (1, 2)), 1: ((0, 1, 2), (0, 1), (0, 2))}, options)


class Routed(nn.Module):
    """Its router breaks the graph; which experts run depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out, kinds = torch.zeros_like(x), (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
        for number, expert in enumerate(self.experts):
            if len(rows := (kinds == number).nonzero().flatten()):
                out = out.index_add(0, rows, expert(x[rows]))
        return x + out


def routed() -> None:
    world = dist.get_world_size()
    torch.manual_seed(0)
    plain = nn.Sequential(Routed(), Routed()).double()
    model: Any = graphshard.compile(
        copy.deepcopy(plain), init_device_mesh("cpu", (world,)), units=["0", "1"], backend="aot_eager"
    )
    model.set_reduce_scatter_unused_params(True)
    for step in range(4):
        inputs = features(step, 2).double()
        model(inputs).square().mean().backward()
        plain(inputs).square().mean().backward()
        for name, parameter in plain.named_parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(grad)
            got = model.get_parameter(name).grad.full_tensor()
            torch.testing.assert_close(got, grad / world, rtol=1e-12, atol=1e-15, msg=f"{name} in step {step}")
        model.zero_grad()
        plain.zero_grad()


@pytest.mark.skipif(not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="this torch has no such flag")
def test_experts_behind_a_router_that_breaks_the_graph_train_where_unused_ones_are_reduced(
    two_ranks: WorkerPool,
) -> None:
    two_ranks.run(routed)


class OneUnit(nn.Module):
    """A block whose routing breaks the graph: graphs that serve several experts on one rank do not on another."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(kinds == number)[0]
            out = out.index_add(0, rows, expert(x[rows]))
        return x + out


class TwoUnits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = OneUnit(), OneUnit()

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x, kinds), kinds.flip(0))
        return out


KINDS = {0: ((1, 1, 1, 1), (0, 1, 2, 2)), 1: ((1, 1, 1, 2), (2, 2, 0, 0))}


def routed_inside_units() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain = TwoUnits().double()
    model: Any = graphshard.compile(
        copy.deepcopy(plain), init_device_mesh("cpu", (world,)), units=["first", "second"], backend="aot_eager"
    )
    for step, kinds in enumerate(KINDS[rank]):
        inputs = features(step, 4).double(), torch.tensor(kinds)
        model(*inputs).square().mean().backward()
        plain(*inputs).square().mean().backward()
        for name, parameter in plain.named_parameters():
            dist.all_reduce(parameter.grad)
            got = model.get_parameter(name).grad.full_tensor()
            torch.testing.assert_close(got, parameter.grad / world, rtol=1e-12, atol=1e-15, msg=f"{name}, step {step}")
        model.zero_grad()
        plain.zero_grad()


def test_experts_of_one_unit_get_other_numbers_of_rows_on_each_rank(two_ranks: WorkerPool) -> None:
    two_ranks.run(routed_inside_units)
