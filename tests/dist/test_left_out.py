"""An optional pass that changes what is computed on one rank is left out by all, with the bits of eager FSDP2."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import models
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.fx import Graph
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard.errors import PassFailed, RanksDiffer
from graphshard.graph.ir import output_args, output_node
from graphshard.lowering import driver
from graphshard.testing import WorkerPool, check_parity

DIM = models.DIM


class Tied(nn.Module):
    """Blocks between two uses of one weight, one of them in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        last: Tensor = checkpoint(self.layers[-1], x, use_reentrant=False)
        return self.head(last).square().mean()  # type: ignore[no-any-return]


def _swap_results(graph: Graph) -> None:
    """Two gradients that look alike change places."""
    results = output_args(graph)
    shapes = [str(getattr(result, "meta", {}).get("val")) for result in results]
    pairs = ((i, j) for i in range(len(shapes)) for j in range(i) if shapes[i] == shapes[j] != "None")
    for i, j in list(pairs)[:1]:
        results[i], results[j] = results[j], results[i]
    output_node(graph).args = (tuple(results),)


def passes_of(name: str, rank: int) -> Callable[[], tuple[object, ...]]:
    """The passes of programs, one of which is broken on one rank."""

    def broken() -> tuple[object, ...]:
        step = next(step for step in driver.PROGRAM if step.name == name)

        def apply(graph: Graph, edit: object) -> None:
            step.apply(graph, edit)
            _swap_results(graph)

        wrong = replace(step, apply=apply)
        return tuple(wrong if known is step and dist.get_rank() == rank else known for known in driver.PROGRAM)

    return broken


def trained(name: str, rank: int, folder: str, strict: bool = False) -> list[str]:
    """Notes of a model that was trained while a pass is broken on one rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    environment = {"GRAPHSHARD_VERIFY": "2", "GRAPHSHARD_FAULTS": folder}
    passes = passes_of(name, rank)()
    with mock.patch.dict(os.environ, environment), mock.patch.object(driver, "PROGRAM", passes):
        result = check_parity(
            Tied,
            lambda index, rank: models.features(index, rank),
            mesh,
            steps=2,
            loss=lambda out: out,
            options={"plan": "fsdp2", "strict": strict},
            expect_collectives=None,
        )
    report = graphshard.report(result.model)
    return [*report.notes, f"{result.launches[-1]}"]


@pytest.mark.parametrize(("name", "rank"), [("assign_buckets", 1), ("order_launches", 0)])
def test_a_pass_that_is_wrong_on_one_rank_is_left_out_by_all(
    name: str, rank: int, two_ranks: WorkerPool, tmp_path: Path
) -> None:
    found = two_ranks.run(trained, name, rank, str(tmp_path))
    said = [[line for line in notes if "is left out of" in line] for notes in found]
    assert said[0] and said[1]
    assert all(f"pass {name} is left out of" in line for line in said[0] + said[1])
    assert "changes what is computed" in said[rank][0] and "it fails on another rank" in said[1 - rank][0]
    assert found[0][-1] == found[1][-1]


def refused(folder: str) -> str:
    """What is raised, by the type that says why."""
    with pytest.raises(Exception) as caught:
        trained("assign_buckets", 0, folder, strict=True)
    error: BaseException | None = caught.value
    while error is not None and not isinstance(error, (PassFailed, RanksDiffer)):
        error = error.__cause__ or error.__context__
    return f"{type(error).__name__}: {error}"


def test_with_strict_it_is_an_error_on_each_rank(two_ranks: WorkerPool, tmp_path: Path) -> None:
    wrong, other = two_ranks.run(refused, str(tmp_path))
    assert wrong.startswith("PassFailed: [V1] pass assign_buckets of ")
    assert other.startswith("RanksDiffer: contract: rank 0 could not lower ") and "pass assign_buckets of" in other


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def notes_of(case: str) -> list[str]:
    """What is said of passes that are right."""
    ranks = dist.get_world_size()
    hybrid = (
        init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp_replicate", "dp_shard")) if ranks > 2 else None
    )
    options = {
        "replicate": {"strategy": "replicate"},
        "hybrid": {"mp_policy": BF16},
    }[case]
    with mock.patch.dict(os.environ, GRAPHSHARD_VERIFY="2"):
        result = check_parity(
            Tied,
            lambda index, rank: models.features(index, rank),
            hybrid or init_device_mesh("cpu", (ranks,)),
            steps=2,
            microbatches=2,
            loss=lambda out: out,
            options={"plan": "fsdp2", **options},
            expect_collectives=None,
        )
    report = graphshard.report(result.model)
    return [line for line in (*report.notes, *report.fallbacks) if "pass" in line]


def test_nothing_is_said_of_right_passes(two_ranks: WorkerPool) -> None:
    assert two_ranks.run(notes_of, "replicate") == [[], []]


@pytest.mark.skipif(
    not models.ROUNDS_GRADIENTS, reason="torch 2.15 reduces some gradients without rounding them to param_dtype"
)
def test_nothing_is_said_of_right_passes_over_copies_of_shards(four_ranks: WorkerPool) -> None:
    assert four_ranks.run(notes_of, "hybrid") == [[]] * 4
