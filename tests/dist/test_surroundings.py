"""What stands around a model, or is done to it in the wrong order, is an error on every rank that says what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import graphshard
from graphshard.testing import WorkerPool

AS_F32 = MixedPrecisionPolicy(param_dtype=torch.float32)


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def annotated(model: nn.Module, **options: Any) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh(), **options)
    return fully_shard(model, mesh=mesh(), **options)


def step(model: nn.Module) -> None:
    model(*models.tokens(0, 0)).square().mean().backward()


def ddp() -> nn.Module:
    return DistributedDataParallel(models.Decoder())


def fsdp1() -> nn.Module:
    return FullyShardedDataParallel(models.Decoder(), device_id=torch.device("cpu"))


def compiled() -> nn.Module:
    return torch.compile(models.Decoder())  # type: ignore[return-value]


def compiled_and_annotated() -> nn.Module:
    return fully_shard(compiled(), mesh=mesh())


# what is brought -> what is said of it
WRAPPED: dict[Callable[[], nn.Module], str] = {
    ddp: r"model: got a DistributedDataParallel, .*; want the Decoder in it, with strategy='replicate'",
    fsdp1: r"model: got a FullyShardedDataParallel, .*; want the Decoder in it, .*fsdp_version=2",
    compiled: r"model: got what torch\.compile made of a Decoder; want that model itself, .*TorchDynamoPlugin",
    compiled_and_annotated: r"model: got what torch\.compile made of a Decoder; want that model itself",
}


def wrapped() -> None:
    for build, said in WRAPPED.items():
        model = build()
        with pytest.raises(ValueError, match=said):
            graphshard.compile(model)
        assert any(finding.verdict == "refused" for finding in graphshard.doctor(model, 2).findings), build
    with pytest.raises(ValueError, match="module '1': got a DistributedDataParallel"):
        graphshard.compile(nn.Sequential(nn.Linear(4, 4), ddp()), mesh())


def test_wrappers_of_other_engines_are_refused(two_ranks: WorkerPool) -> None:
    two_ranks.run(wrapped)


def optimizers() -> None:
    model = models.Decoder()
    optimizer = AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"an optimizer, AdamW, holds \d+ parameters .*'embed\.weight'.* made behind"):
        graphshard.compile(model, mesh(), backend="aot_eager")
    assert not any(isinstance(module, FSDPModule) for module in model.modules())  # nothing was sharded
    optimizer.itself = optimizer  # type: ignore[attr-defined]
    del optimizer  # held by nothing but itself
    before = SGD(models.Decoder().parameters())  # of another model
    graphshard.compile(model, mesh(), backend="aot_eager")
    assert not graphshard.report(model).notes
    del before


def test_optimizer_of_the_parameters_that_sharding_replaces_is_refused(two_ranks: WorkerPool) -> None:
    two_ranks.run(optimizers)


def refused_on_rank_1() -> str:
    """What rank 0 is told at its first step."""
    model, world = models.Decoder(), mesh()
    if torch.distributed.get_rank() == 1:
        optimizer = SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="an optimizer, SGD, holds"):
            graphshard.compile(model, world, backend="aot_eager")
        del optimizer
        torch.distributed.barrier()
        graphshard.compile(models.Decoder(), world, backend="aot_eager")  # the next models have the same numbers again
        return ""
    graphshard.compile(model, world, backend="aot_eager", deadline_s=3.0)
    with pytest.raises((graphshard.RanksDiffer, graphshard.CommunicationFailed)) as raised:
        step(model)
    torch.distributed.barrier()
    return str(raised.value)


def test_model_that_one_rank_refuses_is_no_hang_for_others(two_ranks: WorkerPool) -> None:
    told, _ = two_ranks.run(refused_on_rank_1, timeout_s=60.0)
    assert "rank 1" in told


def optimizers_of_annotated() -> list[list[str]]:
    found = []
    for build in (lambda: models.Decoder(), lambda: annotated(models.Decoder())):  # before fully_shard, behind it
        model = build()
        optimizer = AdamW(model.parameters())
        if not isinstance(model, FSDPModule):
            annotated(model)
        graphshard.compile(model, backend="aot_eager")
        found.append(graphshard.report(model).notes)
        del optimizer
    other = models.Decoder()  # trained by itself beside one of its shapes
    optimizer = AdamW(other.parameters())
    model = graphshard.compile(annotated(models.Decoder()), backend="aot_eager")
    del optimizer
    return [*found, graphshard.report(model).notes]


def test_optimizer_made_before_fully_shard_is_suspected(two_ranks: WorkerPool) -> None:
    for before, behind, beside in two_ranks.run(optimizers_of_annotated):
        assert len(before) == 1
        assert re.match(r"an optimizer, AdamW, holds \d+ parameters that are in no module.* made behind", before[0])
        assert not behind
        assert not beside


def half() -> None:
    said = (
        r"param_dtype=torch\.float32 for parameter 'embed\.weight', which is trained in torch\.bfloat16.*model\.float"
    )
    with pytest.raises(ValueError, match=said):
        graphshard.compile(models.Decoder().bfloat16(), mesh(), mp_policy=AS_F32)
    model = annotated(models.Decoder().bfloat16(), mp_policy=AS_F32)
    with pytest.raises(ValueError, match=said.replace("embed", r".*")):
        graphshard.compile(model)
    assert graphshard.doctor(model).refused
    frozen = models.Decoder().bfloat16().requires_grad_(False)  # a base that is not trained may be
    graphshard.compile(frozen, mesh(), mp_policy=AS_F32, backend="aot_eager")


def test_parameters_trained_in_16_bits_and_gathered_in_32_are_refused(two_ranks: WorkerPool) -> None:
    two_ranks.run(half)


def annotation_behind() -> None:
    model = graphshard.compile(models.Decoder(), mesh(), backend="aot_eager")
    model.head = nn.Linear(models.DIM, models.VOCAB)
    with pytest.raises(RuntimeError, match=r"a Linear with parameter 'weight', .* another took its place"):
        step(model)
    model = graphshard.compile(models.Decoder(), mesh(), backend="aot_eager")
    step(model)
    model.head = fully_shard(nn.Linear(models.DIM, models.VOCAB), mesh=mesh())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"module 'head' was given to fully_shard after graphshard\.compile"):
            step(model)


def test_annotation_behind_compile_is_noticed(two_ranks: WorkerPool) -> None:
    two_ranks.run(annotation_behind)


def compiled_in_place() -> list[str]:
    model = models.Decoder(layers=2)
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    graphshard.compile(model, mesh(), backend="aot_eager")
    step(model)
    assert graphshard.report(model).regions == 1
    return graphshard.report(model).notes


def test_blocks_compiled_in_place_are_traced_through_and_named(two_ranks: WorkerPool) -> None:
    for notes in two_ranks.run(compiled_in_place):
        assert any("torch.compile of 2 modules ('layers.0', ...)" in note for note in notes)
