"""Plans in files: written by one model, replayed by another; refused where the program is not the one planned."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import models
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from graphshard.testing import WorkerPool

SMALL: dict[str, Any] = {"backend": "aot_eager"}


def decoder(path: str = "", **options: Any) -> tuple[nn.Module, tuple[Tensor]]:
    return _compiled(lambda: models.Decoder(layers=1), path, options), models.tokens(0, dist.get_rank())


def mlps(path: str = "", **options: Any) -> tuple[nn.Module, tuple[Tensor]]:
    return _compiled(lambda: models.mlps(2), path, options), models.features(0, dist.get_rank())


class Wider(models.Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(models.DIM, 3 * models.DIM), nn.Linear(3 * models.DIM, models.DIM)


class Renamed(models.Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.raised = self.up
        del self.up

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.raised(x)))


class Rewritten(models.Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.down(torch.relu(self.up(x))))


def of_blocks(block: type[nn.Module], path: str) -> tuple[nn.Module, tuple[Tensor]]:
    model = _compiled(lambda: nn.Sequential(nn.LayerNorm(models.DIM), block(), block()), path, SMALL)
    return model, models.features(0, dist.get_rank())


def _compiled(build: Callable[[], nn.Module], path: str, options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return graphshard.compile(build(), mesh, **options | ({"plan": path} if path else {}))


def step(model: nn.Module, inputs: tuple[Tensor]) -> list[Tensor]:
    """Loss, then gradients of this rank's shards."""
    loss = model(*inputs).square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad.to_local().clone() for parameter in model.parameters())]


def save(model: nn.Module, path: str) -> bytes:
    dist.barrier()  # others have read what was there
    graphshard.save_plan(model, path)
    dist.barrier()
    return Path(path).read_bytes()


def replays(build: Callable[..., Any], path: str, options: dict[str, Any]) -> None:
    model, inputs = build(**options)
    values, content = step(model, inputs), save(model, path)
    again, inputs = build(path, **options)
    for a, b in zip(step(again, inputs), values, strict=True):
        assert torch.equal(a, b)
    first, second = graphshard.report(model), graphshard.report(again)
    assert [(p.direction, p.flags, p.ir) for p in second.programs] == [
        (p.direction, p.flags, p.ir) for p in first.programs
    ]
    assert [p.decision for p in second.programs] == [p.decision for p in first.programs]
    assert second.notes == [], second.notes
    assert save(again, path) == content


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (decoder, SMALL),
        (mlps, SMALL | {"plan": "fsdp2"}),
        (mlps, SMALL | {"reshard_after_forward": True}),
        (mlps, SMALL | {"strategy": "replicate"}),
        (mlps, {"backend": "inductor"}),
    ],
    ids=["decoder", "fsdp2", "reshard", "replicate", "inductor"],
)
def test_replay_gives_the_same_graphs_and_bits(
    two_ranks: WorkerPool, tmp_path: Path, build: Callable[..., Any], options: dict[str, Any]
) -> None:
    two_ranks.run(replays, build, str(tmp_path / "plan.json"), options, timeout_s=280.0)


def keeps_what_was_kept(path: str) -> None:
    chosen = frozenset({"1"})
    with mock.patch("graphshard.planning.planning.remembered_residency", return_value=chosen):
        model, inputs = mlps(**SMALL, memory_budget=10**9)
        values = step(model, inputs)
    save(model, path)
    with mock.patch("graphshard.planning.planning.remembered_residency", side_effect=AssertionError("the file says")):
        again, inputs = mlps(path, **SMALL)
        for a, b in zip(step(again, inputs), values, strict=True):
            assert torch.equal(a, b)
    first, second = graphshard.report(model), graphshard.report(again)
    assert [p.ir for p in second.programs] == [p.ir for p in first.programs]
    assert [p.decision.kept for p in second.programs] == [("1",), None]
    assert second.notes == [], second.notes


def test_replay_keeps_the_units_of_the_file_gathered(two_ranks: WorkerPool, tmp_path: Path) -> None:
    two_ranks.run(keeps_what_was_kept, str(tmp_path / "plan.json"))


def plans_what_is_missing(path: str) -> None:
    model, inputs = mlps(**SMALL)
    step(model, inputs)
    save(model, path)
    content = json.loads(Path(path).read_text())
    content["programs"] = [p for p in content["programs"] if p["outline"]["direction"] == "forward"]
    dist.barrier()
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(content))
    dist.barrier()
    again, inputs = mlps(path, **SMALL)
    for index in range(2):
        step(again, inputs)
        assert len(graphshard.report(again).notes) == 1, index
    flags = next(p.flags for p in graphshard.report(again).programs if p.direction == "backward")
    assert graphshard.report(again).notes == [
        f"plan file {path}: has no plan for region 0 backward [{flags}], which is planned as by plan='auto'"
    ]
    assert [p.ir for p in graphshard.report(again).programs] == [p.ir for p in graphshard.report(model).programs]


def test_program_that_the_file_lacks_is_planned_and_noted_once(two_ranks: WorkerPool, tmp_path: Path) -> None:
    two_ranks.run(plans_what_is_missing, str(tmp_path / "plan.json"))


def refuses(path: str, changed: str) -> str:
    model, inputs = mlps(**SMALL)
    step(model, inputs)
    save(model, path)
    if changed == "precision":
        stale, inputs = mlps(path, **SMALL, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    else:
        stale, inputs = of_blocks({"width": Wider, "name": Renamed, "graph": Rewritten}[changed], path)
    with pytest.raises(graphshard.PlanMismatch) as caught:
        step(stale, inputs)
    assert all(program.decision is None for program in graphshard.report(stale).programs)
    return str(caught.value)


CHANGES = {
    "width": "sizes: gather of 1.up.weight has wire_bytes 2048 in the file and 3072 in the model, gather of 1.up.bias",
    "name": "parameters only in the file: 1.up.weight, 1.up.bias, 2.up.weight and 1 more; "
    "parameters only in the model: 1.raised.weight, 1.raised.bias, 2.raised.weight and 1 more. ",
    "graph": "first op that differs: number ",
    "precision": "sizes: gather of 0.weight has wire_bytes 64 in the file and 32 in the model, ",
}


@pytest.mark.parametrize("changed", CHANGES)
def test_stale_file_is_refused_on_every_rank(two_ranks: WorkerPool, tmp_path: Path, changed: str) -> None:
    path = tmp_path / "plan.json"
    first, second = two_ranks.run(refuses, str(path), changed)
    assert first == second
    start, _, rest = first.partition("]: the program is not the one that was planned: ")
    assert start.startswith(f"plan file {path}: region 0 forward [")
    assert rest.startswith(CHANGES[changed])
    assert first.endswith("or plan anew with plan='auto' and write it with graphshard.save_plan")
    assert changed != "graph" or "parameters" not in first


def refuses_edited(path: str) -> str:
    model, inputs = mlps(**SMALL)
    step(model, inputs)
    save(model, path)
    content = json.loads(Path(path).read_text())
    content["programs"][0]["buckets"][0]["members"].pop()
    dist.barrier()
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(content))
    dist.barrier()
    with pytest.raises(ValueError) as caught:
        mlps(path, **SMALL)
    return str(caught.value)


def refuses_arguments(path: str) -> None:
    for plan, error, message in (
        ("best", ValueError, "compile: plan: got 'best', want one of 'auto', 'fsdp2', the path of a .json file, or"),
        (3, TypeError, "compile: plan: got int, want"),
        (path, ValueError, "No such file or directory; want a file that graphshard.save_plan wrote"),
        (Path(path), ValueError, "No such file or directory"),
    ):
        with pytest.raises(error, match=message):
            mlps(**SMALL, plan=plan)
    model, inputs = mlps(**SMALL)
    with pytest.raises(ValueError, match="save_plan: got a model that has planned no program yet; run a step before"):
        graphshard.save_plan(model, path)
    with pytest.raises(TypeError, match="save_plan: path: got int"):
        graphshard.save_plan(model, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"save_plan: path: got 'plan\.txt', want a name that ends in \.json"):
        graphshard.save_plan(model, "plan.txt")
    with pytest.raises(ValueError, match="save_plan: got a Decoder that is not compiled"):
        graphshard.save_plan(models.Decoder(), path)
    step(model, inputs)
    save(model, path)
    small, inputs = mlps(**SMALL, plan=graphshard.load_plan(path), memory_budget=5)
    with pytest.raises(graphshard.PlanMismatch, match="want at most its memory_budget, 5"):
        step(small, inputs)


def test_wrong_arguments_are_refused(two_ranks: WorkerPool, tmp_path: Path) -> None:
    two_ranks.run(refuses_arguments, str(tmp_path / "plan.json"))


def test_edited_bucket_is_refused_on_every_rank(two_ranks: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    first, second = two_ranks.run(refuses_edited, str(path))
    assert first == second
    assert first.startswith(f"plan file {path}: programs[0].buckets: got ")
    assert re.search("in 0 of kind '(gather|reduce)', want it in one; correct it", first)
