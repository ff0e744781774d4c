"""Ranks that compute in other shapes or other graphs send the same: they train on, bitwise like eager FSDP2."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import models
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.agree import consensus
from graphshard.agree.rank_store import RankStore
from graphshard.api import engine_of
from graphshard.testing import WorkerPool

DIM = models.DIM


class Block(nn.Module):
    """Breaks its graph in the middle when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.breaks = False
        self.at_break: Callable[[], None] = torch._dynamo.graph_break

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x)
        if self.breaks:
            self.at_break()
        return x + self.down(torch.relu(inner))


class Blocks(nn.Module):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(count))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.norm(x)
        return out


def trained(
    build: Callable[[], nn.Module], batch: Callable[[int], Tensor], prepare: Callable[[Any, int], None], **options: Any
) -> tuple[list[Tensor], list[Tensor], graphshard.Report]:
    """What four steps and their evaluations compute, compiled and in eager FSDP2, and the report."""
    torch.manual_seed(0)
    plain = build()
    seen: list[list[Tensor]] = []
    for compiled in (True, False):
        model: Any = graphshard.compile(
            copy.deepcopy(plain), init_device_mesh("cpu", (dist.get_world_size(),)), backend="aot_eager", **options
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found: list[Tensor] = []

        for step in range(4):
            prepare(model, step)
            inputs = batch(step)
            if compiled:
                report = graphshard.report(model)
                loss = model(inputs).square().mean()
                loss.backward()
            else:
                with graphshard.eager(model):
                    loss = model(inputs).square().mean()
                    loss.backward()
            found.append(loss.detach())
            found += [parameter.grad.full_tensor() for parameter in model.parameters() if parameter.requires_grad]
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                if compiled:
                    found.append(model(inputs))
                else:
                    with graphshard.eager(model):
                        found.append(model(inputs))
        seen.append(found)
    return seen[0], seen[1], report


def equal(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), f"number {number}: off by {float((a - b).abs().max()):.1e}"


@contextmanager
def impatient() -> Iterator[None]:
    """A rank that alone asks the others gives up after a second: they never come."""
    with mock.patch.object(consensus, "PATIENCE_S", 1.0):
        yield


def features(step: int, rows: int) -> Tensor:
    return torch.randn(rows, DIM, generator=models.generator(step, dist.get_rank()))


def break_in(model: Any, numbers: tuple[int, ...]) -> None:
    for number, layer in enumerate(model.layers):
        layer.breaks = number in numbers


# -- other shapes


def other_shapes(plan: str, everywhere: bool) -> None:
    rank = dist.get_rank()

    def batch(step: int) -> Tensor:
        return features(step, 4 + (step * 37 * (1 + rank) if everywhere or (rank == 1 and step == 2) else 0))

    got, want, report = trained(models.mlps, batch, lambda model, step: None, plan=plan)
    equal(got, want)
    sent: dict[tuple[str, str], set[str]] = {}
    for program in report.programs:
        sent.setdefault((program.direction, program.flags), set()).add(str(program.collectives))
    assert all(len(kinds) == 1 for kinds in sent.values()), sent
    if everywhere or rank == 1:
        assert len(report.programs) > len(sent), "no program was made for other shapes"


@pytest.mark.parametrize(
    ("plan", "everywhere"), [("auto", True), ("fsdp2", False)], ids=["in every step", "once on one rank"]
)
def test_ranks_with_other_shapes_train_on(two_ranks: WorkerPool, plan: str, everywhere: bool) -> None:
    two_ranks.run(other_shapes, plan, everywhere)


def longer_sequences() -> None:
    rank = dist.get_rank()

    def batch(step: int) -> Tensor:
        size = (2, 6 + (9 * step if rank == 1 else 0))
        return torch.randint(0, models.VOCAB, size, generator=models.generator(step, rank))

    got, want, _ = trained(lambda: models.Decoder(layers=1), batch, lambda model, step: None)
    equal(got, want)


def test_longer_sequences_on_one_rank(four_ranks: WorkerPool) -> None:
    four_ranks.run(longer_sequences)


class Sums(nn.Module):
    """For few rows, saving what is inside takes less memory than saving the sum, which has 8 times as many."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.shift = nn.Parameter(torch.randn(8, 1, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin((self.inner(x) + self.shift).sum(1))


def savings(rows: tuple[int, ...]) -> None:
    """From the second step on, each rank has its `rows`."""
    rank = dist.get_rank()

    def batch(step: int) -> Tensor:
        return features(step, rows[rank] if step else rows[0])

    got, want, report = trained(
        lambda: nn.Sequential(nn.Linear(DIM, DIM), Sums()), batch, lambda model, step: None, plan="fsdp2", units=["1"]
    )
    equal(got, want)
    assert not [program for program in report.programs if "others_shard" in program.ir]  # none had to be extended
    backwards = [program for program in report.programs if program.direction == "backward"]
    assert not any("1.shift" in line for program in backwards for line in program.ir.splitlines() if "gather" in line)


@pytest.mark.parametrize("rows", [(2, 16), (16, 2)], ids=str)
def test_ranks_that_would_save_other_things_gather_the_same_in_backward(
    two_ranks: WorkerPool, rows: tuple[int, ...]
) -> None:
    two_ranks.run(savings, rows)


# -- other graphs


def first_block_frozen() -> Blocks:
    model = Blocks()
    for frozen in (model.embed, model.layers[0]):
        frozen.requires_grad_(False)
    return model


def broken(first: int, who: int, options: dict[str, Any], build: Callable[[], nn.Module] = Blocks) -> None:
    rank = dist.get_rank()

    def prepare(model: Any, step: int) -> None:
        for layer in model.layers[1:3]:
            layer.breaks = rank == who and step >= first

    got, want, report = trained(build, lambda step: features(step, 4), prepare, **options)
    equal(got, want)
    assert any("graph breaks leave parts" in note for note in report.notes) == (rank == who)


@pytest.mark.parametrize(
    ("plan", "first", "who"),
    [("auto", 0, 0), ("auto", 1, 0), ("auto", 1, 1), ("fsdp2", 1, 1)],
    ids=["auto-from the first step-0", "auto-later-0", "auto-later-1", "fsdp2-1"],
)
def test_graph_breaks_on_one_rank(two_ranks: WorkerPool, first: int, who: int, plan: str) -> None:
    two_ranks.run(broken, first, who, {"plan": plan})


@pytest.mark.parametrize(("first", "who"), [(0, 1), (1, 0)])
def test_graph_breaks_on_one_rank_behind_frozen_blocks(two_ranks: WorkerPool, first: int, who: int) -> None:
    """A part of the forward needs no gradient."""
    two_ranks.run(broken, first, who, {"deadline_s": 20.0}, first_block_frozen)


def test_graph_breaks_on_one_of_four_ranks(four_ranks: WorkerPool) -> None:
    four_ranks.run(broken, 1, 2, {"plan": "fsdp2"})  # whose bits are FSDP2's at any size


@impatient()
def accumulating(who: int, everywhere: bool, options: dict[str, Any], reduces_each: bool = False) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain = Blocks()
    seen = []
    for compiled in (True, False):
        model = graphshard.compile(copy.deepcopy(plain), init_device_mesh("cpu", (2,)), backend="aot_eager", **options)
        found: list[Tensor] = []
        for step in range(3):
            for layer in model.layers[1:3]:
                layer.breaks = (rank == who and step >= 1) or (everywhere and layer is model.layers[2])
            for last in (False, True):
                model.set_requires_gradient_sync(last or (reduces_each and not compiled))
                inputs = features(2 * step + last, 4)
                if compiled:
                    model(inputs).square().mean().backward()
                else:
                    if not last:  # both in one: FSDP2 holds what the first leaves unreduced
                        context = graphshard.eager(model)
                        context.__enter__()
                    model(inputs).square().mean().backward()
                    if last:
                        context.__exit__(None, None, None)
            found += [parameter.grad.full_tensor() for parameter in model.parameters()]
            model.zero_grad()
        seen.append(found)
    equal(*seen)


# Those that are said to be ample fit as they are; the tight one if gradients are reduced in every backward.
BUDGETS: dict[str, dict[str, Any]] = {
    "none": {},
    "ample": {"memory_budget": 1 << 20},
    "ample for copies": {"memory_budget": 1 << 20, "strategy": "replicate"},
    "tight": {"memory_budget": 24_000},
}


@pytest.mark.parametrize(
    ("who", "budget"), [(0, "none"), (0, "ample"), (1, "ample for copies"), (0, "tight"), (1, "tight")]
)
def test_graph_breaks_on_one_rank_that_accumulates(two_ranks: WorkerPool, who: int, budget: str) -> None:
    two_ranks.run(accumulating, who, False, BUDGETS[budget], budget == "tight")


def test_graph_breaks_on_one_rank_that_accumulates_beside_those_of_all(two_ranks: WorkerPool) -> None:
    two_ranks.run(accumulating, 1, True, {})


@impatient()
def skipping_blocks(limit: int, broken: tuple[int, ...]) -> None:
    """Dynamo's recompile limit, hit on one rank alone: its frame runs as plain Python around the blocks."""
    import torch._dynamo.config as config

    rank = dist.get_rank()
    with config.patch(recompile_limit=limit if rank == 1 else 64, automatic_dynamic_shapes=False):
        batch, prepare = lambda step: features(step, 4 + step), lambda model, step: break_in(model, broken)
        got, want, report = trained(lambda: Blocks(2), batch, prepare, dynamic=False)
    equal(got, want)
    assert any("graph breaks leave parts" in note for note in report.notes) == (rank == 1)


@pytest.mark.parametrize("broken", [(), (1,)], ids=["one graph", "graph breaks on all ranks"])
def test_recompile_limit_on_one_rank(two_ranks: WorkerPool, broken: tuple[int, ...]) -> None:
    two_ranks.run(skipping_blocks, 5 if broken else 2, broken)


def training_in_silence() -> None:
    torch.manual_seed(0)
    model: Any = graphshard.compile(Blocks(2), init_device_mesh("cpu", (2,)), backend="aot_eager")

    def steps() -> None:
        for step in range(3):
            model(features(step, 4)).square().mean().backward()
            with torch.no_grad():
                model(features(step, 4))

    steps()
    operations = {name: mock.Mock(side_effect=AssertionError(name)) for name in ("set", "get", "add", "has", "wait")}
    with mock.patch.multiple(RankStore, **operations):
        steps()


def test_nothing_is_asked_of_the_store_in_steady_state(two_ranks: WorkerPool) -> None:
    two_ranks.run(training_in_silence)


# -- memory


def gathered_at_breaks() -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    # One unit a block: the contract has a bucket for each.
    units = [f"layers.{number}" for number in range(6)]
    model: Any = graphshard.compile(
        Blocks(6), init_device_mesh("cpu", (2,)), units=units, backend="aot_eager", plan="fsdp2"
    )
    seen: list[int] = []

    @torch.compiler.disable
    def count() -> None:
        seen.append(sum(shard.full is not None for shard in engine_of(model).shards))

    for step in range(3):
        seen.clear()
        for layer in model.layers:
            layer.at_break, layer.breaks = count, rank == 1 and step > 0
        model(features(step, 4)).square().mean().backward()
        if rank == 1 and step:
            # A layer's own four, those of the next, and those of the root.
            assert (seen[-1] >= 20) if step == 1 else all(found <= 12 for found in seen), f"step {step}: {seen}"


def test_rank_whose_graphs_break_frees_what_it_will_not_use_again(two_ranks: WorkerPool) -> None:
    two_ranks.run(gathered_at_breaks)


def broken_within_budget() -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    # Little more than the least that suffices, 30,848; gathered, the parameters take 26,944.
    model: Any = graphshard.compile(Blocks(6), init_device_mesh("cpu", (2,)), backend="aot_eager", memory_budget=31_000)
    for step in range(2):
        for layer in model.layers:
            layer.breaks = rank == 1 and step > 0
        model(features(step, 4)).square().mean().backward()
    held = [note for note in graphshard.report(model).notes if "held for other parts of the call" in note]
    assert bool(held) == (rank == 1), graphshard.report(model).notes


def test_rank_whose_graphs_break_says_that_it_holds_more_than_the_budget(two_ranks: WorkerPool) -> None:
    two_ranks.run(broken_within_budget)


# -- several calls before a backward


def two_calls(who: int) -> None:
    rank = dist.get_rank()

    torch.manual_seed(0)
    plain = Blocks()
    seen = []
    for compiled in (True, False):
        model: Any = graphshard.compile(copy.deepcopy(plain), init_device_mesh("cpu", (2,)), backend="aot_eager")
        found: list[Tensor] = []
        for step in range(4):
            with nullcontext() if compiled else graphshard.eager(model):
                losses = []
                for call in range(2):
                    for layer in model.layers:
                        layer.breaks = rank == who and (step >> call) % 2 == 1
                    losses.append(model(features(2 * step + call, 4)).square().mean())
                sum(losses).backward()
            found += [parameter.grad.full_tensor() for parameter in model.parameters()]
            model.zero_grad()
        seen.append(found)
    equal(*seen)


@pytest.mark.parametrize("who", [0, 1], ids=["on the rank that decides", "on the other"])
def test_graph_breaks_on_one_rank_in_one_of_two_calls(two_ranks: WorkerPool, who: int) -> None:
    two_ranks.run(two_calls, who)
