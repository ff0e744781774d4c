"""`compare_every`: ranks that send alike never notice; once one has drifted, all hear in which call and parameter."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from test_contract import Blocks, features
from test_variants import Experts
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.agree.executed import Executed
from graphshard.api import need_engine
from graphshard.testing import WorkerPool

Drift = Callable[[Any, int], None]


def compiled(model: nn.Module, every: int, shape: tuple[int, ...] = (), **options: Any) -> Any:
    torch.manual_seed(0)
    names = ("copies", "shards") if shape else ("shards",)
    mesh = init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names)
    return graphshard.compile(model, mesh, compare_every=every, **{"backend": "aot_eager", **options})


def train(model: Any, steps: int, batch: Callable[[int], Tensor], before: Drift = lambda model, step: None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(steps):
        before(model, step)
        model(batch(step)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def executed_of(model: Any) -> Executed:
    found = need_engine(model, "test").context.executed
    assert found is not None
    return found


def alike(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    """Other shapes on each rank, accumulation, evaluation: never a word, and every collective has been counted."""
    rank = dist.get_rank()
    model = compiled(models.mlps(2), 4, shape, **options)
    counts = []
    for step in range(2):
        train(model, 1, lambda _, step=step: features(step, 4 + 3 * rank * step))
        model.set_requires_gradient_sync(False)
        model(features(3, 4)).square().mean().backward()
        model.set_requires_gradient_sync(True)
        model(features(4, 4)).square().mean().backward()
        with torch.no_grad():
            model(features(5, 4))
        executed, report = executed_of(model), graphshard.report(model)
        kept = [
            line for roll in executed._rolls.values() for call in roll.calls for lines in call.lines for line in lines
        ]
        kept += [line for roll in executed._rolls.values() for lines in roll._lines for line in lines]
        counts.append((sum(", 1 of " in line for line in kept), sum(report.collectives.values())))
        report.reset_counts()
    model(features(6, 4))  # behind the eighth call
    for counted, launched in counts:
        assert counted == launched > 0, counts


@pytest.mark.parametrize("options", [{}, {"regions": "unit"}, {"strategy": "replicate"}, {"backend": "eager"}], ids=str)
def test_ranks_that_are_alike_do_not_notice(two_ranks: WorkerPool, options: dict[str, Any]) -> None:
    two_ranks.run(alike, (), options)


def test_hybrid_mesh(four_ranks: WorkerPool) -> None:
    four_ranks.run(alike, (2, 2), {"plan": "fsdp2"})


def test_smaller_group_after_forward(four_ranks: WorkerPool) -> None:
    four_ranks.run(alike, (), {"reshard_after_forward": 2})


def graph_break(who: int, shape: tuple[int, ...]) -> None:
    def breaks(model: Any, step: int) -> None:
        for layer in model.layers[1:3]:
            layer.breaks = dist.get_rank() == who and step >= 1

    model = compiled(Blocks(), 1, shape)
    train(model, 5, lambda step: features(step, 4), breaks)
    model(features(9, 4))
    assert any("graph breaks leave parts" in note for note in graphshard.report(model).notes) == (
        dist.get_rank() == who
    )


def test_graph_break_on_one_rank_is_no_difference(two_ranks: WorkerPool) -> None:
    two_ranks.run(graph_break, 0, ())


def test_graph_break_on_one_rank_of_a_hybrid_mesh_is_no_difference(four_ranks: WorkerPool) -> None:
    four_ranks.run(graph_break, 3, (2, 2))


def other_experts() -> None:
    model = compiled(
        Experts((0, 1) if dist.get_rank() == 0 else (1, 2)), 1, units=["experts.0", "experts.1", "experts.2"]
    )
    train(model, 3, lambda step: features(step, 4))
    model(features(9, 4))


def test_experts_that_a_rank_does_not_use_are_no_difference(two_ranks: WorkerPool) -> None:
    two_ranks.run(other_experts)


def told(run: Callable[[], object]) -> str:
    begin = time.monotonic()
    with pytest.raises(graphshard.RanksDiffer) as raised:
        run()
    assert time.monotonic() - begin < 30.0, "it has waited for a deadline"
    return str(raised.value)


def other_parameter() -> None:
    """One rank gathers another of two equal units: nothing hangs, and the results are wrong."""
    rank = dist.get_rank()
    model = compiled(models.mlps(), 4, plan="fsdp2")

    def before(model: Any, step: int) -> None:
        if step == 2:
            unit = model[1 + rank]
            unit.unshard()
            unit.reshard()

    text = told(lambda: train(model, 5, lambda step: features(step, 4), before))
    assert "call 2: ranks differ in the collectives executed over ranks 0, 1, first in place " in text, text
    for number, name in ((0, "1.up.weight"), (1, "2.up.weight")):
        assert f"'all_gather of float32 over 2 ranks: {name} (256 elements), 1 of 4' on rank {number}" in text, text
    train(model, 3, lambda step: features(step, 4))  # who goes on all the same is told again only of what comes then


def test_rank_that_gathers_another_parameter_is_found(two_ranks: WorkerPool) -> None:
    two_ranks.run(other_parameter)


def one_drifts(shape: tuple[int, ...]) -> None:
    """A rank that has counted one more: every rank of the mesh is told."""
    rank = dist.get_rank()
    model = compiled(models.mlps(), 3, shape)

    def before(model: Any, step: int) -> None:
        if step == 1 and rank == dist.get_world_size() - 1:
            record = next(record for record in graphshard.report(model).programs if record.launched)
            executed_of(model).ran(record, list(need_engine(model, "test").shards))

    text = told(lambda: train(model, 4, lambda step: features(step, 4), before))
    assert "call 1: ranks differ in the collectives executed over ranks " in text, text
    assert "all_gather of float32 over 2 ranks: " in text


def test_drift_of_one_rank(two_ranks: WorkerPool) -> None:
    two_ranks.run(one_drifts, ())


def test_drift_of_one_rank_of_a_hybrid_mesh(four_ranks: WorkerPool) -> None:
    four_ranks.run(one_drifts, (2, 2))


def other_numbers() -> None:
    model = compiled(models.mlps(), 1 + dist.get_rank())
    text = told(lambda: train(model, 1, lambda step: features(step, 4)))
    assert "ranks differ in what their programs depend on" in text
    assert "'compare_every 1' on rank" in text


def test_ranks_that_compare_in_other_calls_are_told_before_the_first_program(two_ranks: WorkerPool) -> None:
    two_ranks.run(other_numbers)


def recomputed() -> None:
    model = compiled(models.Checkpointed(layers=1), 1)
    tokens = torch.randint(0, models.VOCAB, (2, 6), generator=models.generator(0, dist.get_rank()))
    train(model, 3, lambda step: tokens)
    with graphshard.eager(model):
        model(tokens).square().mean().backward()
    model(tokens)
    assert executed_of(model)._calls == 4
    lines = [line for line in graphshard.report(model).fallbacks if "compare_every" in line]
    assert lines == ["compare_every: what eager FSDP2 sends is not compared"]


def test_recomputed_checkpoints_and_eager_calls_are_no_calls(two_ranks: WorkerPool) -> None:
    two_ranks.run(recomputed)


def off() -> None:
    model = graphshard.compile(models.mlps(), init_device_mesh("cpu", (2,)), backend="aot_eager")
    assert need_engine(model, "test").context.executed is None


def test_it_is_off_by_default(two_ranks: WorkerPool) -> None:
    two_ranks.run(off)
