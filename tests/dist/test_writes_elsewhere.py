"""Forwards that write parameters of units whose own forward does not run then: FSDP2 writes their shards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import graphshard
from graphshard.testing import Bitwise, RankFailed, TrainingRun, WorkerPool, training_test

Write = Callable[[nn.Module, nn.Module], None]


def by_attribute(teacher: Any, student: nn.Module) -> None:
    teacher.up.weight.data.mul_(1.25)


def in_place(teacher: nn.Module, student: nn.Module) -> None:
    with torch.no_grad():
        for mine, other in zip(teacher.parameters(), student.parameters(), strict=True):
            mine.mul_(0.5).add_(other, alpha=0.5)


def of_data(teacher: nn.Module, student: nn.Module) -> None:
    for mine, other in zip(teacher.parameters(), student.parameters(), strict=True):
        mine.data.lerp_(other.data, 0.5)


def replaced_data(teacher: nn.Module, student: nn.Module) -> None:
    for mine, other in zip(teacher.parameters(), student.parameters(), strict=True):
        mine.data = mine.data * 0.5 + other.data * 0.5


def of_lists(teacher: nn.Module, student: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(teacher.parameters()), 1.25)


def of_local(teacher: nn.Module, student: nn.Module) -> None:
    with torch.no_grad():
        for mine in teacher.parameters():
            assert isinstance(mine, DTensor)
            mine.to_local().mul_(1.25)


def of_items(teacher: nn.Module, student: nn.Module) -> None:
    with torch.no_grad():
        for mine in teacher.parameters():
            assert isinstance(mine, DTensor)
            mine.to_local()[0] = 0.5


@torch.compiler.disable
def hidden(teacher: Any, student: nn.Module) -> None:
    teacher.up.weight.data.mul_(1.25)
    of_data(teacher, student)


@torch.compiler.disable
def hidden_and_late(teacher: Any, student: nn.Module) -> None:
    teacher.forwards = getattr(teacher, "forwards", 0) + 1
    if teacher.forwards > 2:  # an order is followed by then
        teacher.up.weight.data.mul_(1.25)


def nothing(teacher: nn.Module, student: nn.Module) -> None:
    pass


WRITES: dict[str, Write] = {
    write.__name__: write
    for write in (by_attribute, in_place, of_data, replaced_data, of_lists, of_local, of_items, hidden, hidden_and_late)
}


class Distilled(nn.Module):
    """A teacher that follows its student, before or behind its own forward."""

    def __init__(self, write: Write, behind: bool = False) -> None:
        super().__init__()
        self.student, self.teacher, self.head = models.Mlp(), models.Mlp(), models.Mlp()
        self.write, self.behind = write, behind

    def forward(self, x: Tensor) -> Tensor:
        h = self.student(x)
        if not self.behind:
            self.write(self.teacher, self.student)
        h = h + self.teacher(x)
        if self.behind:
            self.write(self.teacher, self.student)
        out: Tensor = self.head(h)
        return out


def annotate(model: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    for unit in (*model.children(), model):
        fully_shard(unit, mesh=mesh, **options)


def train(run: TrainingRun, model: Any, steps: int = 4) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(steps):
        loss = model(*models.features(index, run.rank)).float().square().mean()
        loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


def said(model: nn.Module) -> list[str]:
    return [line for line in graphshard.report(model).fallbacks if line.startswith("forward writes")]


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("name", list(WRITES))
@training_test(tolerance=Bitwise(), allow_eager=("",))
def test_writes_reach_the_shards(run: TrainingRun, name: str, behind: bool) -> None:
    model = run.shard(Distilled(WRITES[name], behind), annotate=annotate)
    train(run, model)
    if not run.is_reference:
        assert len(said(model)) == (name not in ("replaced_data", "hidden", "hidden_and_late"))


@training_test(tolerance=Bitwise(), allow_eager=("",))
def test_writes_are_of_full_precision(run: TrainingRun) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    train(run, run.shard(Distilled(in_place), annotate=partial(annotate, mp_policy=policy)))


@training_test(tolerance=Bitwise(), allow_eager=("",))
def test_one_rank_alone_writes(run: TrainingRun) -> None:
    train(run, run.shard(Distilled(by_attribute if run.rank else nothing), annotate=annotate))


def penalty(teacher: nn.Module, student: nn.Module) -> None:
    total = sum((p * p).sum() for p in teacher.parameters())
    assert isinstance(total, DTensor)
    sums = [torch.zeros(p.shape) for p in teacher.parameters()]
    torch._foreach_add_(sums, [p.full_tensor() for p in teacher.parameters()])


def compiled_whole(write: Write) -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    model = Distilled(write)
    annotate(model, mesh)
    compiled = graphshard.compile(model, mesh, backend="aot_eager", fullgraph=True)
    compiled(*models.features(0, 0)).sum().backward()
    return said(model)


def test_code_that_only_reads_them_is_compiled(two_ranks: WorkerPool) -> None:
    assert two_ranks.run(compiled_whole, penalty) == [[], []]


def test_fullgraph_refuses_writes_by_name(two_ranks: WorkerPool) -> None:
    with pytest.raises(RankFailed, match=r"forward writes teacher\.\S+, .*got fullgraph=True, want fullgraph=False"):
        two_ranks.run(compiled_whole, in_place)
