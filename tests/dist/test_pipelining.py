"""Sharded stages in a pipeline: torch's own schedules drive them as they drive eager FSDP2's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining._backward import stage_backward_input  # what schedules call
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)
from torch.distributed.tensor import DTensor

import graphshard
from graphshard.testing import TrainingRun, WorkerPool, training_test

MICROBATCHES = 4
LAYERS_PER_STAGE = 2
SCHEDULES: dict[str, Any] = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "LoopedBFS": ScheduleLoopedBFS,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "ZBV": ScheduleZBVZeroBubble,
}
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

Annotate = Callable[[nn.Module, DeviceMesh], object]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(models.DIM, 9), nn.Linear(9, models.DIM)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(x)))
        return out


def fully_sharded(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.children():
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
    fully_shard(model, mesh=mesh["dp"])


def fully_sharded_half(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.children():
        fully_shard(layer, mesh=mesh["dp"], mp_policy=HALF, reshard_after_forward=False)
    fully_shard(model, mesh=mesh["dp"], mp_policy=HALF)


def replicated(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.children():
        replicate(layer, mesh=mesh["dp"])
    replicate(model, mesh=mesh["dp"])


def stages_of(run: TrainingRun, schedule: str, annotate: Annotate, told: bool) -> list[PipelineStage]:
    """This rank's stages: one, or two that are half the pipeline apart, or, in a V, as far from its two ends. `told`: a
    compiled one is given `weight_backward`.
    """
    pp = run.mesh["pp"]
    per_rank = 1 if issubclass(SCHEDULES[schedule], PipelineScheduleSingle) else 2
    count = per_rank * pp.size()
    full = [nn.Sequential(*(Layer() for _ in range(LAYERS_PER_STAGE))) for _ in range(count)]
    stages = []
    rank = pp.get_local_rank()
    for index in (rank, count - 1 - rank) if schedule == "ZBV" else range(rank, count, pp.size()):
        module = run.shard(full[index], annotate=annotate)
        dw_builder = graphshard.weight_backward(module) if told and not run.is_reference else None
        stages.append(
            PipelineStage(module, index, count, torch.device("cpu"), group=pp.get_group(), dw_builder=dw_builder)
        )
    return stages


def train(
    run: TrainingRun, schedule: str, annotate: Annotate, dtype: torch.dtype = torch.float32, told: bool = False
) -> None:
    """Two steps of a pipeline. Gradients are scaled in place as soon as a schedule returns: none may be in flight."""
    stages = stages_of(run, schedule, annotate, told)
    optimizers = [torch.optim.AdamW(stage.submod.parameters(), lr=1e-2) for stage in stages]
    one_stage = issubclass(SCHEDULES[schedule], PipelineScheduleSingle)
    pipeline = SCHEDULES[schedule](stages[0] if one_stage else stages, MICROBATCHES, loss_fn=F.mse_loss)
    for index in range(2):
        losses = step(run, pipeline, index, dtype)
        for stage in stages:
            for name, parameter in stage.submod.named_parameters():
                assert parameter.grad is not None, f"stage {stage.stage_index}: {name}.grad"
                parameter.grad.div_(2.0)
                parameter.grad.mul_(2.0)
            run.observe(losses, stage.submod)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def step(run: TrainingRun, pipeline: Any, index: int, dtype: torch.dtype) -> Tensor:
    """One step on this rank's data; the losses of its microbatches on the last rank, nothing elsewhere."""
    pp, dp = run.mesh["pp"], run.mesh["dp"]
    # The ranks of one pipeline see the same batch, two pipelines different ones.
    batch, target = torch.randn(
        2, MICROBATCHES, models.DIM, generator=models.generator(index, dp.get_local_rank()), dtype=dtype
    )
    losses: list[Tensor] = []
    with run.counted(f"step {index}"):
        is_v = isinstance(pipeline, ScheduleZBVZeroBubble)  # the first rank has the last stage, too
        ends = {"target": target, "losses": losses} if is_v or pp.get_local_rank() else {}
        pipeline.step(*([] if pp.get_local_rank() else [batch]), **ends)
    return torch.stack(losses) if losses else torch.zeros(())


@pytest.mark.row("P3")
@pytest.mark.parametrize(
    "schedule",
    [
        "1F1B",
        "LoopedBFS",
        "InterleavedZeroBubble",
        pytest.param("ZBV", marks=pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 sends to itself")),
    ],
)
@training_test(world_size=4, mesh_shape=(2, 2), mesh_axes=("pp", "dp"))
def test_pipeline_of_fully_sharded_stages_trains(run: TrainingRun, schedule: str) -> None:
    train(run, schedule, fully_sharded)


@pytest.mark.row("P3")
@training_test(world_size=4, mesh_shape=(2, 2), mesh_axes=("pp", "dp"))
def test_pipeline_whose_stages_are_told_to_split_their_backwards_trains(run: TrainingRun) -> None:
    train(run, "InterleavedZeroBubble", fully_sharded, told=True)


@pytest.mark.row("P3")
@training_test(world_size=4, mesh_shape=(2, 2), mesh_axes=("pp", "dp"))
def test_pipeline_of_mixed_precision_stages_trains(run: TrainingRun) -> None:
    train(run, "Interleaved1F1B", fully_sharded_half, torch.bfloat16)


@pytest.mark.row("P1")
@pytest.mark.parametrize("schedule", ["GPipe", "InterleavedZeroBubble"])
@training_test(world_size=4, mesh_shape=(2, 2), mesh_axes=("pp", "dp"))
def test_pipeline_of_replicated_stages_trains(run: TrainingRun, schedule: str) -> None:
    train(run, schedule, replicated)


def runtime_of_one_stage(run: TrainingRun, annotate: Annotate, **options: Any) -> tuple[nn.Module, Any]:
    module = run.shard(nn.Sequential(*(Layer() for _ in range(3))), annotate=annotate)
    stage = PipelineStage(module, 0, 1, torch.device("cpu"), group=run.mesh["pp"].get_group())
    return module, _PipelineScheduleRuntime([stage], **options)


def order(*names: str) -> dict[int, list[_Action]]:
    """`order("UNSHARD", "FORWARD 0")`: what the only rank of a pipeline does, for its only stage."""
    actions = []
    for name in names:
        kind, *microbatch = name.split()
        actions.append(_Action(0, getattr(_ComputationType, kind), int(microbatch[0]) if microbatch else None))
    return {0: actions}


@pytest.mark.row("P4")
@pytest.mark.parametrize("annotate", [fully_sharded, fully_sharded_half])
@training_test(mesh_shape=(1, 2), mesh_axes=("pp", "dp"), train=False)
def test_schedule_unshards_and_reshards_a_stage(run: TrainingRun, annotate: Annotate) -> None:
    module, runtime = runtime_of_one_stage(run, annotate, n_microbatches=1, loss_fn=None, scale_grads=False)
    dtype = torch.bfloat16 if annotate is fully_sharded_half else torch.float32
    x = torch.randn(1, models.DIM, generator=models.generator(0, run.rank)).to(dtype)
    run.note_registration("initially", module)
    runtime.pipeline_order_with_comms = order("UNSHARD", "FORWARD 0", "RESHARD")
    run.note("first output", runtime.step(x))
    run.note_registration("after RESHARD", module)
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    runtime.pipeline_order_with_comms = order("UNSHARD", "FORWARD 0")
    with run.counted("forward of an unsharded stage"):
        run.note("second output", runtime.step(x))
    run.note_registration("still unsharded", module)
    assert not any(isinstance(parameter, DTensor) for parameter in module.parameters())


@pytest.mark.row("P4")
@pytest.mark.parametrize("annotate", [fully_sharded, replicated])
@training_test(mesh_shape=(1, 2), mesh_axes=("pp", "dp"))
def test_stage_stays_unsharded_until_the_schedule_reshards_it(run: TrainingRun, annotate: Annotate) -> None:
    module, runtime = runtime_of_one_stage(run, annotate, n_microbatches=2, loss_fn=F.mse_loss)
    # Two forwards live at once; gradients stay unreduced until the reduce action.
    steps = ["UNSHARD", "FORWARD 0", "FORWARD 1", "FULL_BACKWARD 0", "FULL_BACKWARD 1"]
    runtime.pipeline_order_with_comms = order(*steps, "REDUCE_GRAD", "RESHARD")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for index in range(3):
        x, target = torch.randn(2, 2, models.DIM, generator=models.generator(index, run.rank))
        losses: list[Tensor] = []
        with run.counted(f"step {index}"):
            runtime.step(x, target=target, losses=losses)
        run.note_registration(f"after step {index}", module)
        run.observe(torch.stack(losses), module)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.row("P3")
@training_test()
def test_weights_wait_for_the_second_half_of_a_backward(run: TrainingRun) -> None:
    model = run.shard(nn.Sequential(Layer(), Layer()), units=[Layer])
    later = None if run.is_reference else graphshard.weight_backward(model)
    for index in range(2):
        model.set_requires_gradient_sync(False)
        x = torch.randn(1, models.DIM, generator=models.generator(index, run.rank)).requires_grad_()
        loss = model(x).square().mean()
        loss.backward()
        run.note(f"step {index}, gradient of the input", x.grad)
        if later is not None:
            records = graphshard.report(model).programs
            assert [p.runs for p in records if p.flags.startswith("inputs")] == [index + 1]
            assert [p.runs for p in records if p.flags.startswith("weights")] == ([1] if index else [])
            later()()
            assert sum(p.runs for p in records if p.flags.startswith("weights")) == index + 1
        model.set_requires_gradient_sync(True)
        loss = model(x.detach()).square().mean()  # reduces what was held, in one program
        loss.backward()
        run.observe(loss, model)
        model.zero_grad()


def stage_around_a_model() -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = graphshard.compile(nn.Sequential(Layer(), Layer()), mesh, backend="aot_eager")
    around = nn.Sequential(model)
    x = torch.randn(1, models.DIM).requires_grad_()
    with pytest.raises(RuntimeError) as raised:
        stage_backward_input([around(x).sum()], None, [x], around.parameters())
    error = raised.value.__cause__ or raised.value  # torch 2.11 passes it on as it is
    assert isinstance(error, graphshard.UnsupportedModel) and "only contains the compiled model" in str(error)


def test_stage_that_only_contains_a_compiled_model_is_refused(two_ranks: WorkerPool) -> None:
    two_ranks.run(stage_around_a_model)


def halves_that_are_not_run() -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model: Any = graphshard.compile(nn.Sequential(Layer(), Layer()), mesh, backend="aot_eager")
    x = torch.randn(1, models.DIM)
    model(x).sum().backward()
    want = [parameter.grad.full_tensor() for parameter in model.parameters()]
    model.zero_grad()
    loss = model(x).sum()
    if torch.__version__ >= "2.12":  # no input needs a gradient: no backward; an error of autograd's before
        stage_backward_input([loss], None, [x], model.parameters())
    for sync in (False, True):  # what reduces is never put off
        model.set_requires_gradient_sync(sync)
        model(x).sum().backward()
    for parameter, grad in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), 2 * grad, rtol=0, atol=0)
    apart = graphshard.compile(nn.Sequential(Layer()), mesh, backend="eager")
    with pytest.raises(graphshard.UnsupportedModel, match="splits its backward; got backend='eager'"):
        stage_backward_input([apart(x).sum()], None, [x], apart.parameters())


def test_half_of_a_backward_that_does_not_run_puts_nothing_off(two_ranks: WorkerPool) -> None:
    two_ranks.run(halves_that_are_not_run)
