"""What torch's own overlap pass makes of a program, read back as a schedule of graphshard's planner.

`torch._inductor.fx_passes.overlap_scheduling.schedule_overlap_bucketing` gets the graph with one collective for each
parameter, as plain Inductor would. It asks graphshard's cost model for every time; its limits of memory are its own:
1 GB or 5 % above the peak of the graph that it gets. Its order of the computation, its buckets, launches and waits are
then simulated as any other schedule: copies cost what graphshard's own copies of the same buckets do, an operation
costs the same wherever it stands.

The graph that it gets is as on a GPU: its fake tensors are, since the pass counts no memory of others, and attention is
the operator of GPUs, since the pass knows no FLOPs of the one of CPUs.
"""

from __future__ import annotations

import gc
import inspect
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import group as groups
from torch.fx import Graph, GraphModule, Node

from bench.schedule.deep_graph import settle_markers
from bench.schedule.scheduled_graph import kind_of, read_schedule, reorder
from graphshard.compat.fake import fake_process_group
from graphshard.compat.inductor import copy_graph
from graphshard.cost import CostModel, GroupShape, Hardware
from graphshard.graph.ir import PassContext, is_call, is_marker, spec_of, val
from graphshard.graph.liveness import allocations_of, bytes_of
from graphshard.passes import insert_collectives
from graphshard.planner import Problem, Schedule
from graphshard.planning.extraction import Scene, extract_problem
from graphshard.scale.repeat import coarsened

aten = torch.ops.aten
_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001
_ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default  # noqa: SLF001
# As the pass chooses it: the size with this part of the bandwidth, within bounds in MB.
_SATURATION, _LEAST_MB, _MOST_MB = 0.9, 10.0, 500.0
_GROWTH = 1.05


@dataclass(frozen=True)
class Overlapped:
    """What the pass decided: a schedule of `problem`, whose operations are in the order that the pass chose."""

    problem: Problem
    schedule: Schedule


def refusal() -> str | None:
    """Why this torch cannot be compared with; None: it can."""
    schedule = _pass()
    if schedule is None:
        return f"torch {torch.__version__} has no torch._inductor.fx_passes.overlap_scheduling"
    wanted = {"custom_runtime_estimation", "compute_estimator", "bucket_mode", "pre_bucketing_fsdp_collectives"}
    if missing := wanted - set(inspect.signature(schedule).parameters):
        return f"torch {torch.__version__}: schedule_overlap_bucketing has no {', '.join(sorted(missing))}"
    return None


def _pass() -> Callable[..., Any] | None:
    try:
        from torch._inductor.fx_passes.overlap_scheduling import schedule_overlap_bucketing
    except ImportError:
        return None
    found: Callable[..., Any] = schedule_overlap_bucketing
    return found


def overlapped(graph: Graph, ctx: PassContext, scene: Scene) -> Overlapped:
    """Runs torch's pass on a marked graph, which stays as it is.

    Args:
        graph: flags and residency have been applied.
        ctx: its parameters and flags.
        scene: machine and process groups.

    Raises:
        Unreadable: what the pass made is no schedule.
        Exception: whatever the pass raises.
    """
    marked = _copied(graph)
    settle_markers(marked)
    specs = [spec_of(node) for node in marked.nodes if is_marker(node)]
    with fake_process_group(specs[0].world_size):
        lowered = _copied(marked)
        for node in lowered.nodes:
            if is_marker(node):
                name = groups.WORLD.group_name  # type: ignore[union-attr]
                node.args = (*node.args[:-1], str(replace(spec_of(node), group=name)))
        insert_collectives.apply(lowered, insert_collectives.decide(lowered, ctx))
        _move_to_gpu(lowered)
        shape = scene.group_shape(specs[0].group)
        gm = GraphModule(lowered.owning_module, lowered)
        schedule = _pass()
        assert schedule is not None
        with _rates_of(scene.cost.hardware), _quiet():
            schedule(
                gm,
                collective_bucketing=True,
                custom_runtime_estimation=_estimates(gm.graph, scene.cost, shape),
                compute_estimator="analytical",
                collective_estimator="analytical",
                bucket_mode="custom_ops",
                pre_bucketing_fsdp_collectives_bucket_cap_mb=saturating_mb(scene.cost, shape),
            )
    reorder(marked, gm.graph)
    problem = coarsened(extract_problem(marked, ctx, scene))
    return Overlapped(problem, read_schedule(gm.graph, marked, ctx, problem, scene.cost))


@contextmanager
def _rates_of(hardware: Hardware) -> Iterator[None]:
    """Answers for the GPU that may not be here: the pass makes estimates of its own, too, before it drops them."""
    with (
        patch("torch.utils._runtime_estimation.get_gpu_dram_gbps", lambda: hardware.memory_gb_s),
        patch("torch.utils._runtime_estimation.get_device_tflops", lambda _: max(hardware.matmul_tflops.values())),
    ):
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the lines that torch logs for each graph, and without collecting garbage: that walks all nodes often."""
    before, collects = logging.root.manager.disable, gc.isenabled()
    logging.disable(logging.WARNING)
    gc.disable()
    try:
        yield
    finally:
        logging.disable(before)
        if collects:
            gc.enable()


def saturating_mb(cost: CostModel, shape: GroupShape) -> float:
    """The size in MB at which an all-gather reaches most of its bandwidth: the pass's rule, on our rates."""
    us_per_byte = cost.us_per_byte("all_gather", shape)
    size_mb = _LEAST_MB
    while size_mb < _MOST_MB:
        num_bytes = math.ceil(size_mb * 2**20)
        if num_bytes * us_per_byte >= _SATURATION * cost.collective_us("all_gather", num_bytes, shape):
            break
        size_mb *= _GROWTH
    return min(size_mb, _MOST_MB)


def _copied(graph: Graph) -> Graph:
    return copy_graph(GraphModule(graph.owning_module, graph))


def _estimates(graph: Graph, cost: CostModel, shape: GroupShape) -> Callable[[Node, int | None], float]:
    """What the pass asks for the milliseconds of a node; those that it adds itself are copies, by their bytes."""
    known = {node.name: us for node, us in cost.graph_us(graph).items()}

    def estimate(node: Node, num_bytes: int | None) -> float:
        kind = kind_of(node)
        if kind is None:
            us = known.get(node.name)
            return (cost.alone_us(node) if us is None else us) / 1e3
        full = val(node) if kind == "all_gather" else val(node.args[0])
        return cost.collective_us(kind, num_bytes or full.nbytes, shape) / 1e3

    return estimate


def _move_to_gpu(graph: Graph) -> None:
    """Fake values on a GPU, each in memory of its own unless it is a view: nodes that were copied share theirs."""
    mode = next(value.fake_mode for node in graph.nodes if isinstance(value := node.meta.get("val"), Tensor))
    found = allocations_of(graph)
    sizes = {allocation: bytes_of(allocation) for allocations in found.values() for allocation in allocations}
    whole: dict[Any, Tensor] = {}

    def moved(value: Any, allocation: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if allocation not in whole:
            whole[allocation] = torch.empty(sizes[allocation], dtype=torch.uint8, device="meta")
        memory = whole[allocation][: sizes[allocation] // value.itemsize * value.itemsize].view(value.dtype)
        part = memory.as_strided(value.shape, value.stride(), value.storage_offset())
        return FakeTensor(mode, part, torch.device("cuda", 0))

    for node in graph.nodes:
        _name_attention(node)
        value, inside = node.meta.get("val"), found[node]
        if isinstance(value, Tensor):
            node.meta["val"] = moved(value, inside[0])
        elif isinstance(value, (list, tuple)) and inside:
            by_place = {allocation.place: allocation for allocation in inside if allocation.node is node}
            node.meta["val"] = type(value)(moved(one, by_place.get(i, inside[0])) for i, one in enumerate(value))


def _name_attention(node: Node) -> None:
    """Calls attention as it is called on a GPU; what only that operator reads is not there, and never read."""
    if is_call(node, _ATTENTION):
        node.target = aten._scaled_dot_product_flash_attention.default  # noqa: SLF001
    elif is_call(node, _ATTENTION_BACKWARD):
        *tensors, dropout, is_causal = node.args[:8]
        lengths = [val(tensors[i]).shape[2] for i in (1, 2)]
        any_tensor = tensors[5]
        node.target = aten._scaled_dot_product_flash_attention_backward.default  # noqa: SLF001
        node.args = (*tensors, any_tensor, any_tensor, *lengths, dropout, is_causal, any_tensor, any_tensor)
