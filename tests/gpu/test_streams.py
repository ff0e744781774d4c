"""Streams and memory on one GPU, on the pretended network of `bench.networks`: eight ranks, seven of which mirror this.

Its numbers are those of identical peers, so eager FSDP2 on the same network is the reference. Collectives are slow here
and move their bytes late, which shows what is read before its wait, or written while it is sent.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import models
import pytest
import test_models
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from bench.harness.models import ManyParameters
from bench.networks.loopback import Loopback
from graphshard.testing import WorkerPool, compare_named, compare_tensors
from graphshard.testing.compare import Where
from graphshard.testing.devices import no_synchronization
from graphshard.testing.reference import shard_compiled, shard_eager
from graphshard.testing.steps import StepRecord, StepSequence, Trainer, moved, place
from graphshard.testing.tolerance import Tolerance

WORLD_SIZE = 8
SLOW_US = 3000.0
TIMEOUT_S = 300.0
SYSTEMS = [("aot_eager", "fsdp2"), ("aot_eager", "auto"), ("inductor", "fsdp2"), ("inductor", "auto")]
# Blocks of 8 MB, in fp32, each a unit.
BLOCKS, DIM, BATCH = 8, 1024, 256
# Two steps' allocations of the loopback network's marks, and the allocator's rounding of each tensor.
ROUNDING_BYTES = 2**20


@contextmanager
def network(device: str, **options: Any) -> Iterator[tuple[Loopback, DeviceMesh]]:
    """The pretended process group in the place of the worker's own."""
    dist.destroy_process_group()
    with Loopback(WORLD_SIZE, **options) as pretended:
        yield pretended, init_device_mesh(device, (WORLD_SIZE,))


def sharded(model: nn.Module, mesh: DeviceMesh, backend: str | None, **options: Any) -> Any:
    """The model on the mesh; backend None: under eager FSDP2."""
    place(model, mesh.device_type)
    if backend is None:
        shard_eager(model, mesh, options, None)
    else:
        shard_compiled(model, mesh, backend, {"strict": True, **options}, None)
    return model


def block_model() -> nn.Module:
    torch.manual_seed(0)
    return ManyParameters(6 * BLOCKS, 1, DIM)


# --- memory that is used again too early


def poison() -> None:
    """Fills what the caching allocator holds free for the current stream with NaN, in all dtypes."""
    if not torch.cuda.is_initialized():
        return
    stream = torch.cuda.current_stream().cuda_stream
    taken: list[Tensor] = []
    for segment in torch.cuda.memory_snapshot():
        if segment["stream"] != stream or segment.get("segment_pool_id", (0, 0)) != (0, 0):
            continue
        most = 2**20 if segment["segment_type"] == "small" else 2**62  # larger ones come from another pool
        for block in segment["blocks"]:
            size = block["size"] if block["state"] == "inactive" else 0
            while size >= 512:
                part = min(size, most)
                taken.append(torch.empty(part // 4, device="cuda").fill_(torch.nan))
                size -= part


def steps_on(mesh: DeviceMesh, backend: str | None, **options: Any) -> list[StepRecord]:
    torch.manual_seed(0)
    model = sharded(models.Decoder(layers=3), mesh, backend, **options)
    sequence = StepSequence(models.tokens, optimizer=test_models.sgd, microbatches=2, device=mesh.device_type)
    trainer, records = Trainer(model, sequence), []
    for step in range(sequence.steps):
        record = trainer.compute(step)
        poison()
        records.append(trainer.update(record))
        poison()
    return records


def check_records(got: Sequence[StepRecord], want: Sequence[StepRecord], tolerance: Tolerance) -> None:
    """NaN is a difference even where both have it."""
    for step, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        for a, b in zip(ours.losses, theirs.losses, strict=True):
            compare_tensors(a, b, tolerance=tolerance, where=Where("loss", step=step))
        for what in ("gradients", "parameters"):
            pair = getattr(ours, what), getattr(theirs, what)
            compare_named(*pair, tolerance=tolerance, where=Where(what, step=step))


def train_poisoned(device: str, backend: str, plan: str, bf16: bool) -> list[str]:
    """Steps whose freed memory is overwritten behind every launch; returns the kinds of launches."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else None
    options = {"mp_policy": policy} if policy else {}
    tolerance = test_models.INDUCTOR if backend == "inductor" else test_models.BITWISE
    with network(device, alpha_us=20.0) as (_, mesh):
        want = steps_on(mesh, None, **options)
    with Loopback(WORLD_SIZE, alpha_us=SLOW_US, late=True, on_launch=poison) as slow:
        got = steps_on(init_device_mesh(device, (WORLD_SIZE,)), backend, plan=plan, **options)
        kinds = [launch.kind for launch in slow.launches if launch.sent_bytes]
    # Another mesh, of equal shape, and gone with its process group: compare the shards.
    for records in (got, want):
        for record in records:
            for named in (record.gradients, record.parameters):
                named.update({name: local(value) for name, value in named.items()})
    check_records(got, want, tolerance)
    return kinds


def local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


@pytest.mark.parametrize(("backend", "plan"), SYSTEMS)
def test_memory_is_not_used_after_it_is_freed(gpu: WorkerPool, backend: str, plan: str) -> None:
    (kinds,) = gpu.run(train_poisoned, gpu.device, backend, plan, False, timeout_s=TIMEOUT_S)
    assert {"all_gather", "reduce_scatter"} <= set(kinds)


def test_memory_of_fused_casts_is_not_used_after_it_is_freed(gpu: WorkerPool) -> None:
    gpu.run(train_poisoned, gpu.device, "aot_eager", "auto", True, timeout_s=TIMEOUT_S)


def read_too_early(device: str) -> tuple[bool, bool]:
    """Whether a slow and late network shows a read before the wait, and a write into what is sent."""
    dist.destroy_process_group()
    with Loopback(WORLD_SIZE, alpha_us=50_000.0, late=True):
        group = init_device_mesh(device, (WORLD_SIZE,)).get_group()
        x, out = torch.ones(1024, device=device), torch.zeros(WORLD_SIZE * 1024, device=device)
        work: Any = dist.all_gather_into_tensor(out, x, group=group, async_op=True)
        early = out.clone()
        x.fill_(2.0)
        work.wait()
        return bool((early == 0).all()), bool((out == 2.0).all())


def test_network_shows_what_is_read_and_written_too_early(gpu: WorkerPool) -> None:
    assert gpu.run(read_too_early, gpu.device) == [(True, True)]


# --- streams


def hold_time_us(us: float) -> float:
    """How long a stream was held."""
    from bench.networks import hold_stream  # needs Triton

    device = torch.device("cuda", torch.cuda.current_device())
    hold_stream.hold(hold_stream.mark(device), 1.0)  # compiles
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(10_000_000)  # cycles: 5 ms, until all is enqueued
    start.record()
    hold_stream.hold(hold_stream.mark(device), us)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


@pytest.mark.parametrize("us", [50.0, 2000.0, 100_000.0])
def test_stream_is_held_for_its_time(gpu: WorkerPool, us: float) -> None:
    (held_us,) = gpu.run(hold_time_us, us)
    assert us - 2.0 <= held_us <= 1.02 * us + 100.0


class Kernel(NamedTuple):
    """A kernel that ran: its stream and its time, in us."""

    name: str
    stream: int
    start_us: float
    end_us: float


def kernels_of_a_step(device: str, backend: str, plan: str, folder: Path) -> list[Kernel]:
    with network(device, alpha_us=SLOW_US, gb_s=300.0) as (_, mesh):  # longer than the host takes for all of a step
        model = sharded(block_model(), mesh, backend, plan=plan, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        x = moved(torch.randn(BATCH, DIM), device)
        for _ in range(3):
            model(x).backward()
        with torch.profiler.profile() as profiler:  # the GPU's, too, where there is one
            model(x).backward()
            if device == "cuda":
                torch.cuda.synchronize()
    trace = folder / f"{backend}.{plan}.json"
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    return [
        Kernel(event["name"], event["args"]["stream"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "kernel"
    ]


@pytest.mark.parametrize(("backend", "plan"), SYSTEMS)
def test_collectives_run_beside_the_computation(gpu: WorkerPool, tmp_path: Path, backend: str, plan: str) -> None:
    (kernels,) = gpu.run(kernels_of_a_step, gpu.device, backend, plan, tmp_path, timeout_s=TIMEOUT_S)
    if not kernels:
        pytest.skip("the profiler sees no kernels: the GPU's counters are not for this user")
    held = [kernel for kernel in kernels if kernel.name == "hold_until"]
    (communication,) = {kernel.stream for kernel in held}
    computing = [kernel for kernel in kernels if kernel.stream != communication]
    copies = [kernel for kernel in kernels if kernel.name == "copy_segments"]  # none where buckets are coalesced
    assert len(computing) > len(copies) and all(kernel.stream != communication for kernel in copies)
    beside = [
        kernel
        for kernel in computing
        if any(hold.start_us < kernel.end_us and kernel.start_us < hold.end_us for hold in held)
    ]
    assert beside, "nothing was computed while a collective was under way"


# --- the host


def step_without_synchronization(device: str, backend: str, plan: str) -> None:
    with network(device, alpha_us=100.0) as (_, mesh):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        model = sharded(block_model(), mesh, backend, plan=plan, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        inputs = [moved(torch.randn(BATCH, DIM), device) for _ in range(2)]

        def step() -> None:
            for microbatch, x in enumerate(inputs):
                model.set_requires_gradient_sync(microbatch == 1)
                model(x).backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
            with no_synchronization():
                step()
        step()


@pytest.mark.parametrize(("backend", "plan"), SYSTEMS)
def test_steady_step_waits_for_nothing(gpu: WorkerPool, backend: str, plan: str) -> None:
    gpu.run(step_without_synchronization, gpu.device, backend, plan, timeout_s=TIMEOUT_S)


# --- memory


def peak_bytes(device: str, backend: str | None, plan: str) -> int:
    """Of a steady forward and backward, above what is there before; 0 on CPU, where nobody counts."""
    options = {} if backend is None else {"plan": plan}
    gc.collect()
    with network(device, alpha_us=100.0) as (_, mesh):
        model = sharded(block_model(), mesh, backend, mp_policy=MixedPrecisionPolicy(torch.bfloat16), **options)
        x = moved(torch.randn(BATCH, DIM), device)
        for _ in range(3):
            model(x).backward()
            model.zero_grad()
        if device == "cpu":
            return 0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(x).backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize(("backend", "plan"), SYSTEMS)
def test_step_needs_no_more_memory_than_eager_fsdp2(gpu: WorkerPool, backend: str, plan: str) -> None:
    (want,) = gpu.run(peak_bytes, gpu.device, None, "", timeout_s=TIMEOUT_S)
    (got,) = gpu.run(peak_bytes, gpu.device, backend, plan, timeout_s=TIMEOUT_S)
    assert got <= want + ROUNDING_BYTES


# --- CUDA graphs


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: local(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def capture_step(model: Any, x: Tensor, inputs: Sequence[Tensor]) -> None:
    """Captures a forward and a backward; replays must give the losses and gradients of steps that run as they are."""

    def step() -> Tensor:
        model.zero_grad()  # sets them to None: each backward makes new ones
        loss: Tensor = model(x)
        loss.backward()
        return loss

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        loss = step()
    captured = {name: p.grad for name, p in model.named_parameters()}
    seen = []
    for values in inputs:
        x.copy_(values)
        graph.replay()
        seen.append((loss.detach().clone(), {name: local(grad).clone() for name, grad in captured.items()}))
    for values, (its_loss, gradients) in zip(inputs, seen, strict=True):
        x.copy_(values)
        want = step().detach()
        compare_tensors(its_loss, want, tolerance=test_models.BITWISE, where=Where("loss"))
        want_of = gradients_of(model)
        compare_named(gradients, want_of, tolerance=test_models.BITWISE, where=Where("gradient"))
    first, second = (next(iter(gradients.values())) for _, gradients in seen[:2])
    assert not torch.equal(first, second)  # losses may be the same, in bf16


def new_inputs(device: str) -> list[Tensor]:
    return [torch.randn(BATCH, DIM, generator=models.generator(index, 0)).to(device) for index in range(3)]


def capture_one_rank(device: str, backend: str) -> None:
    mesh = init_device_mesh(device, (1,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = sharded(block_model(), mesh, backend, mp_policy=policy)
    inputs = new_inputs(device)
    capture_step(model, inputs[0].clone(), inputs)


def capture_collectives(device: str, backend: str, plan: str) -> None:
    with network(device, alpha_us=50.0) as (_, mesh):
        model = sharded(block_model(), mesh, backend, plan=plan, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        inputs = new_inputs(device)
        capture_step(model, inputs[0].clone(), inputs)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_captured_step_of_one_rank_replays(gpu: WorkerPool, backend: str) -> None:
    gpu.run(capture_one_rank, gpu.device, backend, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize(("backend", "plan"), SYSTEMS)
def test_captured_step_with_its_collectives_replays(gpu: WorkerPool, backend: str, plan: str) -> None:
    gpu.run(capture_collectives, gpu.device, backend, plan, timeout_s=TIMEOUT_S)


def train_with_cudagraphs(device: str) -> tuple[list[float], list[float], int]:
    """Losses of steps without and with Inductor's own CUDA graphs, and how many programs it did not capture."""
    from torch._dynamo.utils import counters
    from torch._inductor import config

    mesh = init_device_mesh(device, (1,))
    inputs = new_inputs(device)

    def losses(step: Callable[[], object]) -> list[float]:
        model = sharded(block_model(), mesh, "inductor")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for x in inputs * 2:
            step()
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    plain = losses(lambda: None)
    counters.clear()
    with config.patch({"triton.cudagraphs": True}):  # around the backwards, too: they are compiled when they first run
        graphs = losses(torch.compiler.cudagraph_mark_step_begin)
    return plain, graphs, counters["inductor"]["cudagraph_skips"]


def test_cudagraphs_of_inductor_change_no_loss(gpu: WorkerPool) -> None:
    """`graphshard.compile` passes no options to Inductor: who wants its CUDA graphs sets them for all it compiles."""
    ((plain, graphs, skipped),) = gpu.run(train_with_cudagraphs, gpu.device, timeout_s=TIMEOUT_S)
    assert graphs == pytest.approx(plain, rel=1e-5)
    if skipped:
        pytest.skip(f"Inductor captured not all: it left out {skipped} programs")
