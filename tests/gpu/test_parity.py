"""Parity with eager FSDP2 on CUDA: one rank of an NCCL process group, and two ranks over gloo that share a GPU.

The bodies are those of tests/dist. Over gloo, torch copies CUDA tensors through pinned memory and waits for the host:
`_allgather_base`, which eager FSDP2 and `all_gather_into_tensor_out` use, `allreduce`, `reduce_scatter` (an all-reduce
of a copy) and `broadcast` take them. Its coalesced all-gather, behind the functional `all_gather_into_tensor`, hands
their addresses to the host and crashes (pytorch#152645): programs give outputs to their gathers there
(`graphshard.gather_outputs`), and nothing here calls `full_tensor` on a shard.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import models
import pytest
import test_models
import test_policies
import test_state
import test_training
import test_unshard
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from graphshard.testing import TrainingRun, WorkerPool, rerun, training_test

TIMEOUT_S = 300.0

# cuDNN reads the weights of an LSTM as one buffer, and its batch norm is another operator where it is traced.
CUDNN = {"lstm", "conv_batchnorm"}
CASES = [case for case in test_models.CASES if case not in CUDNN]
FEW = ["decoder", "tied", "uneven", "low_rank", "nested"]


@pytest.fixture(params=["nccl_rank", "gloo_pair"])
def workers(request: pytest.FixtureRequest) -> WorkerPool:
    found: WorkerPool = request.getfixturevalue(request.param)
    return found


# --- models


@pytest.mark.parametrize("case", CASES)
def test_aot_eager_is_bitwise_equal(workers: WorkerPool, case: str) -> None:
    workers.run(test_models.parity, case, "aot_eager", workers.device, timeout_s=TIMEOUT_S)


def parity_without_cudnn(case: str, device: str) -> None:
    torch.backends.cudnn.enabled = False
    try:
        test_models.parity(case, "aot_eager", device)
    finally:
        torch.backends.cudnn.enabled = True


def test_aot_eager_is_bitwise_equal_without_cudnn(workers: WorkerPool) -> None:
    workers.run(parity_without_cudnn, "conv_batchnorm", workers.device, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("case", FEW)
def test_planned_programs_are_bitwise_equal(workers: WorkerPool, case: str) -> None:
    workers.run(test_models.parity, case, "aot_eager", workers.device, "auto", timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("case", FEW)
def test_backend_eager_is_bitwise_equal(gloo_pair: WorkerPool, case: str) -> None:
    gloo_pair.run(test_models.parity, case, "eager", gloo_pair.device, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("case", [*FEW, "conv_batchnorm", "dropout", "checkpointed"])
def test_inductor_is_within_its_bound(nccl_rank: WorkerPool, case: str) -> None:
    if case == "conv_batchnorm" and torch.__version__ < "2.12":
        pytest.skip("Inductor of torch 2.11 cannot lower a convolution whose bias is a view of a computed buffer")
    nccl_rank.run(test_models.parity, case, "inductor", nccl_rank.device, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("plan", ["fsdp2", "auto"])
@pytest.mark.parametrize("case", FEW)
def test_inductor_with_collectives_is_within_its_bound(gloo_pair: WorkerPool, case: str, plan: str) -> None:
    gloo_pair.run(test_models.parity, case, "inductor", gloo_pair.device, plan, timeout_s=TIMEOUT_S)


# --- training loops


@training_test(tolerance=test_training.BITWISE)
def clip_gradients(run: TrainingRun) -> None:
    """By a norm over all ranks, which is less than they have."""
    model = run.shard(models.Decoder(layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for index in range(3):
        loss = test_training.loss_of(model, run, index)
        loss.backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        run.note(f"step {index}: norm", norm.full_tensor())  # an all-reduce
        assert norm.full_tensor().item() > 1e-3
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


@training_test(tolerance=test_training.BITWISE)
def train_in_bf16(run: TrainingRun) -> None:
    """Of a decoder: attention, norms and an embedding in param_dtype."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = run.shard(models.Decoder(layers=2), mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(3):
        for synchronized in (False, True):
            model.set_requires_gradient_sync(synchronized)
            loss = test_training.loss_of(model, run, 2 * index + synchronized).float()
            loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


class Widening(nn.Module):
    """Layers large enough for cuBLAS to choose its kernels by more than their alignment."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(models.DIM, 1000), nn.Linear(1000, 768, bias=False)
        self.third = nn.Linear(768, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return logits


@training_test(tolerance=test_training.BITWISE)
def train_larger_layers(run: TrainingRun) -> None:
    model = run.shard(Widening(), units=[nn.Linear])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(2):
        loss = model(*models.features(index, run.rank)).square().mean()
        loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


class Loop(NamedTuple):
    """A loop of tests/dist, or of this file, and its arguments."""

    test: Callable[..., None]
    arguments: dict[str, Any]


LOOPS = {
    "fused AdamW": Loop(test_training.test_optimizers_see_dtensor_gradients, {"make": "adamw_fused"}),
    "foreach AdamW": Loop(test_training.test_optimizers_see_dtensor_gradients, {"make": "adamw_foreach"}),
    "gathered until backward": Loop(test_training.test_reshard_after_forward_changes_no_bit, {"reshard": False}),
    "resharded": Loop(test_training.test_reshard_after_forward_changes_no_bit, {"reshard": True}),
    "accumulation": Loop(test_training.test_microbatches_synchronize_in_any_pattern, {}),
    "params bf16": Loop(test_training.test_mixed_precision, {"policy": "bf16"}),
    "params bf16, reduce f32": Loop(test_training.test_mixed_precision, {"policy": "bf16, reduce f32"}),
    "f32, reduce bf16": Loop(test_training.test_mixed_precision, {"policy": "f32, reduce bf16"}),
    "decoder in bf16": Loop(train_in_bf16, {}),
    "reduce f16 and f64": Loop(test_policies.test_reductions_that_divide_before_and_after_the_sum, {}),
    "larger layers": Loop(train_larger_layers, {}),
    "annotated": Loop(test_training.test_annotated_model_keeps_its_units, {}),
    "regions of units": Loop(test_training.test_regions_change_no_bit, {"regions": "unit"}),
    "two forwards, two backwards": Loop(test_training.test_two_forwards_then_two_backwards, {}),
    "unshard ahead": Loop(test_unshard.test_forward_waits_for_what_unshard_launched, {}),
    "offloaded": Loop(test_policies.test_parameters_offloaded_to_cpu, {"tied": False, "pin_memory": False}),
    "offloaded, pinned": Loop(test_policies.test_parameters_offloaded_to_cpu, {"tied": False, "pin_memory": True}),
    "frozen and thawed": Loop(test_training.test_frozen_and_thawed_between_steps, {}),
    "clipped": Loop(clip_gradients, {}),
}
# They count the collectives of two ranks.
ONLY_PAIRS = {"unshard ahead"}


@pytest.mark.parametrize("loop", LOOPS)
def test_training_loop_is_bitwise_equal(workers: WorkerPool, loop: str) -> None:
    if workers.world_size == 1 and loop in ONLY_PAIRS:
        pytest.skip("one rank launches nothing")
    test, arguments = LOOPS[loop]
    rerun(test, workers, "aot_eager", timeout_s=TIMEOUT_S, **arguments)


def test_training_resumes_from_a_checkpoint(workers: WorkerPool, tmp_path: Path) -> None:
    test = test_state.test_training_resumes_from_a_checkpoint
    annotate = test_state.fully_sharded
    rerun(test, workers, "aot_eager", timeout_s=TIMEOUT_S, annotate=annotate, tmp_path=tmp_path)


def measure_over_nccl(device: str) -> str:
    model = graphshard.compile(models.Decoder().to(device), init_device_mesh(device, (1,)), backend="aot_eager")
    with pytest.raises(RuntimeError) as raised, graphshard.measure(model):
        pass
    return str(raised.value)


def test_measure_is_refused_where_waits_do_not_hold_the_host(nccl_rank: WorkerPool) -> None:
    assert nccl_rank.run(measure_over_nccl, nccl_rank.device)[0].startswith("measure: got collectives on cuda")
