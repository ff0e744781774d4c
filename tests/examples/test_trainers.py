"""What accelerate and Fabric do in the wrong order, or contrary to an annotation, is an error that says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trainers
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import common
import graphshard
from graphshard.testing import WorkerPool


def accelerator(knows_fsdp: bool = True, **options: Any) -> Any:
    trainers.as_torchrun_does()
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState

    state = PartialState(cpu=True)
    if knows_fsdp:
        state.distributed_type = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    return Accelerator(fsdp_plugin=plugin, cpu=True, **options)


def prepared(made: Any) -> Any:
    model = common.build_model()
    return made.prepare(model, torch.optim.AdamW(model.parameters()))[0]


def accelerate_in_the_wrong_order() -> None:
    accelerator()
    with pytest.raises(ValueError, match=r"got a plain model, while accelerate .* accelerator\.prepare\(model, opt"):
        graphshard.compile(common.build_model(), backend="aot_eager")
    with pytest.raises(ValueError, match=r"got what torch\.compile made of a Decoder; .*TorchDynamoPlugin"):
        graphshard.compile(prepared(accelerator(dynamo_backend="aot_eager")))
    with pytest.raises(ValueError, match=r"got a DistributedDataParallel, .*FSDP plugin is not in force"):
        graphshard.compile(prepared(accelerator(knows_fsdp=False)))


def test_accelerate(two_ranks: WorkerPool) -> None:
    trainers.need("accelerate")
    two_ranks.run(accelerate_in_the_wrong_order)


def mixed_precision() -> list[list[float]]:
    losses: list[list[float]] = []
    for compiled in (False, True):
        made = accelerator(mixed_precision="bf16")
        model = prepared(made)
        if compiled:
            graphshard.compile(model, backend="aot_eager")
        drawn = common.text(made.process_index, 2).draw
        losses.append([])
        for number in range(2):
            loss = model(*drawn(number, 0))
            made.backward(loss)
            losses[-1].append(float(loss))
    return losses


def test_accelerates_mixed_precision_is_that_of_eager_fsdp2(two_ranks: WorkerPool) -> None:
    trainers.need("accelerate")
    for eager, compiled in two_ranks.run(mixed_precision):
        assert eager == compiled


def shard(model: nn.Module, mesh: Any) -> nn.Module:
    return fully_shard(model, mesh=mesh["data_parallel"])


def fabric() -> Any:
    trainers.as_torchrun_does()
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
    made = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    made.launch()
    return made


def fabric_in_both_orders() -> None:
    made = fabric()
    model = graphshard.compile(common.build_model(), backend="aot_eager")
    with pytest.raises(AssertionError, match="fully_shard has already been applied"):  # torch's own
        made.setup_module(model)
    model = made.setup_module(common.build_model())
    graphshard.compile(model, backend="aot_eager")  # Fabric's wrapper may be in it
    assert isinstance(model.module, FSDPModule)
    made.backward(model(*common.text(made.global_rank, 2).draw(0, 0)))
    assert sum(program.runs for program in graphshard.report(model).programs) == 2


def test_fabric(two_ranks: WorkerPool) -> None:
    trainers.need("lightning_fabric")
    two_ranks.run(fabric_in_both_orders)
