"""The harness itself: parity checks agree with a healthy engine and fail with one that is broken on purpose."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import graphshard
from graphshard.reporting.report import Report
from graphshard.testing import (
    ParityError,
    RankFailed,
    TrainingRun,
    WorkerPool,
    check_parity,
    mutants,
    rerun,
    training_test,
)
from graphshard.testing.reference import shard_eager


class Net(nn.Module):
    """Two equal blocks, an uneven head and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 3)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        logits: Tensor = self.head(x)
        return logits


def net_inputs(index: int, rank: int) -> tuple[Tensor]:
    return (torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * index + rank)),)


# --- mutants on graphs of their own


def collective_graph(kind: str, operator: str = "avg") -> fx.GraphModule:
    """x -> wait(launch(x)) for the default group."""
    c10d, graph = torch.ops._c10d_functional, fx.Graph()
    x = graph.placeholder("x")
    if kind == "all_gather":
        launched = graph.call_function(c10d.all_gather_into_tensor.default, (x, 2, "0"))
    elif kind == "reduce_scatter":
        launched = graph.call_function(c10d.reduce_scatter_tensor.default, (x, operator, 2, "0"))
    else:
        launched = graph.call_function(c10d.all_reduce.default, (x, operator, "0"))
    graph.output(graph.call_function(c10d.wait_tensor.default, (launched,)))
    return fx.GraphModule(nn.Module(), graph)


def run_mutated(kind: str, operator: str, mutant: str, calls: list[list[float]]) -> list[list[float]]:
    """Results of each call, whose input is scaled by rank + 1."""
    rank = torch.distributed.get_rank()
    gm = collective_graph(kind, operator)
    assert getattr(mutants, mutant)(gm) == 1
    return [gm(torch.tensor(values) * (rank + 1)).tolist() for values in calls]


@pytest.mark.parametrize(
    ("kind", "operator", "mutant", "calls", "want"),
    [
        ("reduce_scatter", "avg", "drop_reductions", [[1.0, 3.0]], [[[1.0]], [[6.0]]]),
        ("all_reduce", "avg", "drop_reductions", [[1.0, 3.0]], [[[1.0, 3.0]], [[2.0, 6.0]]]),
        ("reduce_scatter", "avg", "swap_average_and_sum", [[1.0, 3.0]], [[[3.0]], [[9.0]]]),
        ("all_reduce", "sum", "swap_average_and_sum", [[2.0]], [[[3.0]], [[3.0]]]),
        ("all_gather", "", "stale_gathers", [[1.0], [5.0]], [[[1.0, 2.0], [1.0, 2.0]]] * 2),
    ],
)
def test_mutant_edits_do_what_they_say(
    two_ranks: WorkerPool, kind: str, operator: str, mutant: str, calls: Any, want: Any
) -> None:
    assert two_ranks.run(run_mutated, kind, operator, mutant, calls) == want


# --- parity


def net_parity(backend: str, options: dict[str, Any]) -> tuple[list[float], list[dict[str, int]], int]:
    result = check_parity(Net, net_inputs, init_device_mesh("cpu", (2,)), backend=backend, **options)
    return result.losses, result.launches, result.max_ulp


@pytest.mark.parametrize("microbatches", [1, 2])
def test_parity_of_a_healthy_engine(two_ranks: WorkerPool, microbatches: int) -> None:
    options = {"microbatches": microbatches, "expect_collectives": "at_most"}
    (losses, launches, max_ulp), (other_losses, *_) = two_ranks.run(net_parity, "aot_eager", options)
    assert len(losses) == 3
    assert losses != other_losses
    assert max_ulp == 0
    assert launches[0]["reduce_scatter"] == 3


def test_parity_of_inference(two_ranks: WorkerPool) -> None:
    for _, launches, _ in two_ranks.run(net_parity, "aot_eager", {"train": False}):
        assert launches[0] == {"all_gather": 3, "reduce_scatter": 0, "all_reduce": 0}


def parity_error(fault: str | None, options: dict[str, Any]) -> tuple[str, int]:
    """Message of the ParityError that a broken engine leads to, and how many nodes the fault changed."""
    context: AbstractContextManager[mutants.Edited] = getattr(mutants, fault)()
    with context as edited, pytest.raises(ParityError) as raised:
        check_parity(Net, net_inputs, init_device_mesh("cpu", (2,)), **options)
    return str(raised.value), edited.count


@pytest.mark.parametrize(
    ("fault", "options", "message"),
    [
        ("dropped_reduction", {}, r"gradient .*, step 0, rank \d"),
        ("wrong_divide_factor", {}, r"gradient .*, step 0, rank \d"),
        ("stale_gather", {}, r"output '0', step 1, rank \d"),
        ("lost_accumulation", {"microbatches": 2}, r"gradient .*, step 0, rank \d"),
    ],
)
def test_parity_fails_on_mutant(two_ranks: WorkerPool, fault: str, options: dict[str, Any], message: str) -> None:
    for told, edited in two_ranks.run(parity_error, fault, options):
        assert re.match(message, told), told
        assert edited > 0


def standing_still(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def outcome(build: Callable[[], nn.Module], options: dict[str, Any]) -> str:
    try:
        check_parity(build, net_inputs, init_device_mesh("cpu", (2,)), **options)
    except ParityError as error:
        return str(error)
    return "agreed"


def test_parity_fails_when_no_parameter_moves(two_ranks: WorkerPool) -> None:
    for told in two_ranks.run(outcome, Net, {"optimizer": standing_still}):
        assert "no parameter moved" in told


class Broken(nn.Linear):
    """Dynamo breaks the graph before the weight is read."""

    def forward(self, x: Tensor) -> Tensor:
        return self.outside(x)

    @torch.compiler.disable
    def outside(self, x: Tensor) -> Tensor:
        return super().forward(x)


def broken_net() -> nn.Module:
    net = Net()
    net.head = Broken(6, 3)
    return net


def test_parity_fails_when_a_part_ran_outside_programs(two_ranks: WorkerPool) -> None:
    for told in two_ranks.run(outcome, broken_net, {}):
        assert "ran outside compiled programs" in told
        assert "head.weight gathered eagerly 3 times" in told
    allowed = {"allow_eager": ("head.weight", "head.bias", "head reads parameters outside"), "expect_collectives": None}
    assert two_ranks.run(outcome, broken_net, allowed) == ["agreed"] * 2


def silent_fallback() -> str:
    def compile_nothing(model: nn.Module, mesh: DeviceMesh, **options: object) -> nn.Module:
        shard_eager(model, mesh, {}, None)
        return model

    with (
        mock.patch.object(graphshard, "compile", compile_nothing),
        mock.patch.object(graphshard, "report", lambda model: Report()),
    ):
        return outcome(Net, {})


def test_parity_fails_when_everything_fell_back(two_ranks: WorkerPool) -> None:
    for told in two_ranks.run(silent_fallback):
        assert "the model did not run compiled: got programs []" in told


# --- training_test


@pytest.mark.parametrize("learning_rate", [0.1, 0.5])
@training_test(expect_collectives="at_most")
def test_training_test_of_a_healthy_engine(run: TrainingRun, learning_rate: float) -> None:
    model = run.shard(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    for step in range(2):
        loss = model(*net_inputs(step, run.rank)).square().mean()
        torch.autograd.backward(loss)
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


@training_test()
def observes_nothing(run: TrainingRun) -> None:
    run.shard(Net())(*net_inputs(0, run.rank))


@training_test()
def shards_nothing(run: TrainingRun) -> None:
    run.observe(torch.ones(()), Net())


@training_test()
def never_trains(run: TrainingRun) -> None:
    model = run.shard(Net())
    run.observe(torch.ones(()), model)


@training_test(world_size=4, mesh_shape=(2, 2), mesh_axes=("replicate", "shard"))
def differs_by_one_ulp(run: TrainingRun) -> None:
    model = run.shard(Net(), annotate=on_inner_axis)
    loss = model(*net_inputs(0, run.rank)).square().mean()
    torch.autograd.backward(loss)
    if not run.is_reference and run.rank == 1:
        loss = torch.nextafter(loss.detach(), torch.tensor(math.inf))
    run.observe(loss, model)


def on_inner_axis(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh["shard"])


@pytest.mark.parametrize(
    ("test", "message"),
    [
        (observes_nothing, "run.observe"),
        (shards_nothing, "never called run.shard"),
        (never_trains, "did not run compiled"),
        (differs_by_one_ulp, "rank 1 of 4 raised: .*ParityError: loss, step 0, rank 1: 1 of 1 elements differ"),
    ],
)
def test_training_test_fails(test: Callable[..., None], message: str) -> None:
    with pytest.raises(RankFailed, match=message):
        test(backend="aot_eager")


def test_rerun_takes_other_ranks(two_ranks: WorkerPool, four_ranks: WorkerPool) -> None:
    rerun(test_training_test_of_a_healthy_engine, four_ranks, "aot_eager", learning_rate=0.1)
    with pytest.raises(RankFailed, match=r"rank 1 of 2 raised: .*ParityError: loss, step 0, rank 1"):
        rerun(differs_on_rank_one, two_ranks, "aot_eager")
    with pytest.raises(ValueError, match=r"rerun: workers: got 2 ranks, want a mesh of \(2, 2\)"):
        rerun(differs_by_one_ulp, two_ranks, "aot_eager")


@training_test(world_size=4)
def differs_on_rank_one(run: TrainingRun) -> None:
    model = run.shard(Net())
    loss = model(*net_inputs(0, run.rank)).square().mean()
    torch.autograd.backward(loss)
    run.observe(loss + (0.0 if run.is_reference else 1.0 * run.rank), model)
