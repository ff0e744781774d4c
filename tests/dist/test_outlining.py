"""Equal blocks share traces and compiled bodies, as many for many as for few, with the results of eager FSDP2."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import models
import pytest
import torch
from test_models import INDUCTOR, sgd
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard.compat.dynamo import boxed_graph
from graphshard.lowering.driver import after_lowering
from graphshard.testing import TrainingRun, WorkerPool, check_parity, training_test


class Block(nn.Module):
    def __init__(self, dropout: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(models.DIM)
        self.up, self.down = nn.Linear(models.DIM, 2 * models.DIM), nn.Linear(2 * models.DIM, models.DIM)
        self.dropout = nn.Dropout(0.1) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        dropped: Tensor = self.dropout(hidden)
        return x + dropped


class Stack(nn.Module):
    """Equal blocks, and a last layer that is none."""

    def __init__(self, layers: int, checkpointed: bool = False, tied: bool = False, dropout: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.layers = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.last = nn.Linear(models.DIM, 3)
        if tied:
            self.layers[4].up.weight = self.layers[1].up.weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        out: Tensor = self.last(x)
        return out


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.mix = nn.Linear(models.DIM, models.DIM), nn.Linear(models.DIM, models.DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.mix(torch.sigmoid(self.gate(x)) * x)
        return x + mixed


class Mapped(Block):
    """Maps a function, as associative scans do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.vmap(lambda row: row.sin() * row.sum())(x))


class Attending(Block):
    """Names the kernels that attention may take, as torchtitan does."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, -1)).transpose(0, 1)[None]
        with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
            found = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return super().forward(found[0].transpose(0, 1).flatten(1))


class Mixed(Stack):
    """Blocks of two kinds in turns, in which no run of blocks repeats often."""

    def __init__(self, kinds: str, checkpointed: bool = False, dropout: bool = False) -> None:
        super().__init__(0, checkpointed)
        self.layers = nn.ModuleList(Block(dropout) if kind == "b" else Gated() for kind in kinds)


KINDS = "bbggbgbbggbg"


def bodies(build: Callable[[], nn.Module]) -> list[tuple[str, int, int]]:
    """Of each program of a step: its direction, its bodies, and the calls of them. None is compiled."""
    torch.manual_seed(0)
    model: Any = graphshard.compile(build(), init_device_mesh("cpu", (2,)))
    with mock.patch.object(graphshard.lowering.bodies, "compile_body", lambda gm, *_: boxed_graph(gm)):
        model(*models.features(0, torch.distributed.get_rank())).square().mean().backward()
    calls = {p.direction: re.findall(r"(body_\d+)\(_read", p.code or "") for p in graphshard.report(model).programs}
    return [(direction, len(set(called)), len(called)) for direction, called in calls.items()]


@pytest.mark.parametrize(
    ("build", "of_few", "of_many", "most"),
    [(partial(Stack, dropout=True), 6, 12, 8), (partial(Mixed, dropout=True), KINDS, KINDS + "g" + KINDS, 12)],
    ids=["one kind", "two kinds"],
)
def test_many_blocks_have_no_more_bodies_than_few(
    two_ranks: WorkerPool, build: Callable[..., nn.Module], of_few: Any, of_many: Any, most: int
) -> None:
    few, many = (two_ranks.run(bodies, partial(build, layers))[0] for layers in (of_few, of_many))
    for (direction, count, calls), (_, more_count, more_calls) in zip(few, many, strict=True):
        assert more_count <= min(count + 1, most), direction  # where buckets end depends on how many there are
        assert more_calls >= calls + 6, direction  # one or more of each block


def test_three_equal_units_have_bodies_in_common(two_ranks: WorkerPool) -> None:
    for direction, count, calls in two_ranks.run(bodies, partial(Mixed, "gbgbb"))[0]:
        assert calls >= count + 2, direction


@training_test()
def test_blocks_of_several_kinds_are_traced_once_each(run: TrainingRun) -> None:
    torch.manual_seed(0)
    model: Any = run.shard(Mixed(KINDS, checkpointed=run.rank == 0), units=[Block, Gated])
    for step in range(3):
        loss = model(*models.growing_features(step, run.rank)).square().mean()
        loss.backward()
        run.observe(loss, model)
    assert run.is_reference or graphshard.report(model).traced_once[0] >= 2 * (len(KINDS) - 2)


@training_test()
def test_three_equal_units_are_traced_once_wherever_they_stand(run: TrainingRun) -> None:
    torch.manual_seed(0)
    model: Any = run.shard(Mixed("gbgbb", checkpointed=run.rank == 0), units=[Block, Gated])
    loss = model(*models.growing_features(0, run.rank)).square().mean()
    loss.backward()
    run.observe(loss, model)
    assert run.is_reference or graphshard.report(model).traced_once == (3, 1)


@training_test(backends=("inductor",), tolerance=INDUCTOR)
def test_outlined_blocks_accumulate(run: TrainingRun) -> None:
    torch.manual_seed(0)
    model: Any = run.shard(Stack(5), units=[Block])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        model.set_requires_gradient_sync(step % 2 == 1)
        with run.counted(f"step {step}") if step == 3 else nullcontext():
            loss = model(*models.features(step, run.rank)).square().mean()
            loss.backward()
        if step % 2:
            run.observe(loss, model)
            optimizer.step()
            optimizer.zero_grad()


@training_test(train=False)
def test_equal_blocks_run_without_gradients(run: TrainingRun) -> None:
    model = run.shard(Stack(4), units=[Block])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            run.note("output", model(*models.features(0, run.rank)))


class Gathered(Stack):
    """What it makes of its blocks' results, it writes into one of them."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = [x := layer(x) for layer in self.layers]
        written = hidden[1].clone()
        written[:, :2] += hidden[2][:, :2]
        out: Tensor = self.last(written + hidden[3] * hidden[4].sin())
        return out


@training_test(backends=("inductor",), tolerance=INDUCTOR)
def test_results_of_equal_blocks_meet_in_one_body(run: TrainingRun) -> None:
    torch.manual_seed(0)
    model: Any = run.shard(Gathered(5), units=[Block])
    loss = model(*models.features(0, run.rank)).square().mean()
    loss.backward()
    run.observe(loss, model)


@training_test()
def test_blocks_are_traced_once_where_sizes_change(run: TrainingRun) -> None:
    torch.manual_seed(0)
    model: Any = run.shard(Stack(6, checkpointed=run.rank == 0), units=[Block])
    for step in range(4):
        loss = model(*models.growing_features(step, run.rank)).square().mean()
        loss.backward()
        run.observe(loss, model)
    assert run.is_reference or graphshard.report(model).traced_once[0] >= 10  # of numbers, then of symbols


@pytest.mark.parametrize("kind", [Mapped, Attending])
@training_test()
def test_blocks_in_which_something_is_in_effect_are_traced_once(run: TrainingRun, kind: type[Block]) -> None:
    torch.manual_seed(0)
    stack = Stack(0)
    stack.layers.extend(kind() for _ in range(6))
    model: Any = run.shard(stack, units=[kind])
    loss = model(*models.features(0, run.rank)).square().mean()
    loss.backward()
    run.observe(loss, model)
    assert run.is_reference or graphshard.report(model).traced_once[0] >= 5


class Recycled(Stack):
    """Its input is what it made of it before, without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            before = super().forward(x)
        return super().forward(x + before.mean())


@training_test()
def test_blocks_may_have_run_without_gradients_before(run: TrainingRun) -> None:
    model: Any = run.shard(Recycled(4), units=[Block])
    loss = model(*models.features(0, run.rank)).square().mean()
    loss.backward()
    run.observe(loss, model)
    assert run.is_reference or graphshard.report(model).traced_once[0] >= 4


def traced_once_by_rank_0() -> AbstractContextManager[Any]:
    """Other ranks trace equal blocks one by one."""
    if torch.distributed.get_rank() == 0:
        return nullcontext()
    return mock.patch.object(graphshard.passes.collapse_blocks, "find_blocks", lambda *_: [])


def planned(build: Callable[[], nn.Module]) -> None:
    seams: list[int] = []
    with (
        traced_once_by_rank_0(),
        after_lowering(
            lambda gm, direction: seams.append(sum(node.meta.get("seam", False) for node in gm.graph.nodes))
        ),
    ):
        check_parity(
            build=build,
            inputs=models.growing_features,
            mesh=init_device_mesh("cpu", (2,)),
            backend="inductor",
            steps=2,
            tolerance=INDUCTOR,
            optimizer=sgd,
            options={"plan": "auto", "dynamic": True},
            expect_collectives=None,
        )
    assert seams and min(seams) >= 5, seams


@pytest.mark.parametrize("build", [partial(Stack, 6), partial(Mixed, KINDS)], ids=["one kind", "two kinds"])
def test_planned_launches_at_seams_change_no_result(two_ranks: WorkerPool, build: Callable[..., nn.Module]) -> None:
    two_ranks.run(planned, partial(build, checkpointed=True))


def traced(options: dict[str, bool]) -> None:
    with traced_once_by_rank_0():
        check_parity(
            build=lambda: Stack(6, **options),
            inputs=models.features,
            mesh=init_device_mesh("cpu", (2,)),
            backend="aot_eager",
            steps=2,
            optimizer=sgd,
            expect_collectives=None,
        )


@pytest.mark.parametrize("options", [{"checkpointed": True, "tied": True}, {"dropout": True}], ids=str)
def test_blocks_that_one_rank_traces_once_keep_every_bit(two_ranks: WorkerPool, options: dict[str, bool]) -> None:
    two_ranks.run(traced, options)
