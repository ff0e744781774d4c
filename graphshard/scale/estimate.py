"""One training step on paper: forward and backward as a planner schedules them, and the optimizer.

    step = accumulation x (forward + backward) + optimizer

    optimizer   AdamW reads parameter, gradient and two moments and writes three of them: 7 accesses of each element of
                this rank's shards; clipping the gradients 3 more, and an all-reduce of one number. All at the
                machine's copy rate.
    memory      at the worst place of a program, by the simulator: parameters, activations (all that it computes with
                and saves, and in backward what forward left gathered), gathered parameters, gradients, buffers of
                collectives; besides that two moments for each parameter and, where gradients are accumulated, the
                sharded sum of the gradients so far.
    MFU         3 x FLOPs of one forward (matmuls and attention; of causal attention half) x accumulation
                / (step time x peak dense bf16 FLOP/s). What is recomputed does not count.

Source: FLOPs of backward as twice those of forward, and MFU without recomputation: PaLM (arXiv 2204.02311), appendix B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from graphshard.cost import CostModel, Hardware
from graphshard.cost.topology import group_shape
from graphshard.planner import (
    BudgetTooSmall,
    Choice,
    Problem,
    best_schedule,
    choose_residency,
    fsdp2_peaks,
    fsdp2_schedule,
    live_by_category,
    lower_bound_us,
    simulate,
    with_residency,
)
from graphshard.planning.extraction import Scene, extract_problem
from graphshard.scale.blocks import check_blocks
from graphshard.scale.model_size import Repetition, forward_flops, shard_sizes
from graphshard.scale.repeat import coarsened, repeated
from graphshard.scale.resize import RankLayout, program_on
from graphshard.scale.trace import Traced, TracedProgram

# Dense bf16, of the datasheets.
PEAK_TFLOPS: Mapping[str, float] = {"a100": 312.0, "h100": 989.0, "h100-500w": 989.0, "h200": 989.0, "b200": 2250.0}

_ADAMW_ACCESSES, _CLIPPING_ACCESSES, _MOMENTS = 7, 3, 2


@dataclass(frozen=True)
class Workload:
    """What is traced of a model, and how much work it is.

    Attributes:
        traced: its programs, of one microbatch.
        repetition: blocks that were traced for more.
        tokens: of one microbatch.
    """

    traced: Traced
    repetition: Repetition
    tokens: int


@dataclass(frozen=True)
class Setting:
    """Where and how a step runs.

    Attributes:
        hardware: of every rank.
        layout: of the ranks.
        plan: ``"auto"``: buckets, order and what stays gathered are searched; ``"fsdp2"``: FSDP2's.
        budget_bytes: most that a rank may allocate with ``"auto"``; None: as much as FSDP2's schedules do.
        accumulation: microbatches of a step; gradients are reduced in each.
        fused: whether Inductor compiles the programs.
        sequence_ranks: ranks that share the tokens of a microbatch evenly (context parallelism; its own communication
            is not counted). They are part of the layout's shards.
    """

    hardware: Hardware
    layout: RankLayout
    plan: str = "auto"
    budget_bytes: int | None = None
    accumulation: int = 1
    fused: bool = True
    sequence_ranks: int = 1


@dataclass(frozen=True)
class StepEstimate:
    """One step of one rank.

    Attributes:
        setting: what was asked.
        step_us: of the step.
        forward_us, backward_us: of one microbatch.
        optimizer_us: of the optimizer.
        exposed_us: time of the step in which nothing is computed, for a collective to end.
        lower_bound_us: no schedule takes less.
        tokens_per_s: of one rank.
        mfu: share of the machine's peak; None where the peak is not known.
        memory_bytes: most that is allocated, by category.
        schedules: of forward and backward: which schedule was taken.
    """

    setting: Setting = field(repr=False)
    step_us: float
    forward_us: float
    backward_us: float
    optimizer_us: float
    exposed_us: float
    lower_bound_us: float
    tokens_per_s: float
    mfu: float | None
    memory_bytes: Mapping[str, int]
    schedules: tuple[str, str]

    @property
    def peak_bytes(self) -> int:
        """Most that is allocated."""
        return sum(self.memory_bytes.values())

    @property
    def fits(self) -> bool:
        """Whether a rank has that much memory."""
        return self.peak_bytes <= self.setting.hardware.memory_bytes


def estimate_step(workload: Workload, setting: Setting) -> StepEstimate:
    """Estimates one step.

    Raises:
        BudgetTooSmall: no schedule fits the budget.
        NotRepeated: some of the model's blocks do not stand for all: trace every one.
    """
    traced, repetition, layout = workload.traced, workload.repetition, setting.layout
    cost = CostModel(setting.hardware, setting.fused)
    shards = shard_sizes(traced, repetition, layout)
    beside_bytes = shards.num_bytes * (_MOMENTS + (setting.accumulation > 1))
    budget_bytes = None if setting.budget_bytes is None else max(0, setting.budget_bytes - beside_bytes)
    problems, budget_bytes = _problems(workload, setting, cost, budget_bytes)
    choices = [_choice(problem, setting, budget_bytes, beside_bytes) for problem in problems]
    forward_us, backward_us = (choice.simulation.step_us for choice in choices)
    optimizer_us = _optimizer_us(cost, shards.num_bytes, layout)
    step_us = setting.accumulation * (forward_us + backward_us) + optimizer_us
    bound_us = setting.accumulation * sum(choice.lower_bound_us for choice in choices) + optimizer_us
    peak_tflops = PEAK_TFLOPS.get(setting.hardware.name)
    flops = 3 * forward_flops(traced, repetition) * setting.accumulation / setting.sequence_ranks
    tokens = workload.tokens * setting.accumulation / setting.sequence_ranks / layout.tensor
    return StepEstimate(
        setting,
        step_us,
        forward_us,
        backward_us,
        optimizer_us,
        setting.accumulation * sum(choice.simulation.exposed_us for choice in choices),
        bound_us,
        tokens / step_us * 1e6,
        flops / (step_us * peak_tflops * 1e6) if peak_tflops else None,
        _memory(problems, choices, shards.num_bytes, setting.accumulation),
        (choices[0].name, choices[1].name),
    )


def _problems(
    workload: Workload, setting: Setting, cost: CostModel, budget_bytes: int | None
) -> tuple[tuple[Problem, Problem], int]:
    """Forward and backward, and what each may allocate: as `graphshard.compile` decides what stays gathered."""
    programs = workload.traced.forward, workload.traced.backward
    if setting.plan == "fsdp2":
        forward, backward = (_problem(program, workload, setting, cost) for program in programs)
        return (forward, backward), 0
    forward, backward = (_problem(program, workload, setting, cost, stays=False) for program in programs)
    stays = frozenset(programs[0].params[name].unit for name in programs[0].stays)
    if budget_bytes is None:
        budget_bytes = max(fsdp2_peaks(forward, backward, stays).values())
    kept = choose_residency(forward, backward, budget_bytes)
    return with_residency(forward, backward, kept), budget_bytes


def _problem(
    program: TracedProgram, workload: Workload, setting: Setting, cost: CostModel, stays: bool = True
) -> Problem:
    layout, repetition = setting.layout, workload.repetition
    graph, ctx = program_on(program, layout, stays)
    shapes = layout.group_shapes(setting.hardware.ranks_per_node, workload.traced.tensor_group)
    problem = extract_problem(graph, ctx, Scene(cost, shapes))
    sizes = shard_sizes(workload.traced, repetition, layout)
    if repetition.extra:
        check_blocks(program.gm.graph, program.params, repetition.units)
        problem = repeated(problem, repetition.units, repetition.layers, sizes.block_bytes)
    if layout.batches == 1:
        problem = _on_one_rank(problem, any(param.dtype != torch.bfloat16 for param in workload.traced.params))
    if setting.sequence_ranks > 1:
        problem = _shared(problem, setting.sequence_ranks, sizes.num_bytes)
    return coarsened(problem)


def _on_one_rank(problem: Problem, casts: bool) -> Problem:
    """Nothing is sent: what is left of a gather or a reduction is a cast, if parameters are not held in bf16."""
    return replace(
        problem,
        gathers=tuple(
            replace(g, copy_in_us=g.alone_in_us, copy_out_us=0.0, alone_out_us=0.0, alone_out_bytes=0)
            for g in problem.gathers
        ),
        reductions=tuple(
            replace(r, copy_in_us=r.alone_in_us * casts, alone_in_us=r.alone_in_us * casts, copy_out_us=0.0)
            for r in problem.reductions
        ),
    )


def _shared(problem: Problem, ranks: int, shards_bytes: int) -> Problem:
    """The same work and activations, divided among `ranks`."""
    op_bytes = tuple(shards_bytes + (num_bytes - shards_bytes) // ranks for num_bytes in problem.op_bytes)
    return replace(problem, op_us=tuple(us / ranks for us in problem.op_us), op_bytes=op_bytes)


def _choice(problem: Problem, setting: Setting, budget_bytes: int, beside_bytes: int) -> Choice:
    if setting.plan == "fsdp2":
        schedule = fsdp2_schedule(problem)
        return Choice(schedule, simulate(problem, schedule), lower_bound_us(problem), "fsdp2", ())
    try:
        return best_schedule(problem, budget_bytes)
    except BudgetTooSmall as error:
        raise BudgetTooSmall(
            f"memory budget: got {setting.budget_bytes} bytes, of which the optimizer and accumulated gradients take "
            f"{beside_bytes}; {error}, besides those; shard over more ranks, compute smaller batches or checkpoint more"
        ) from error


def _optimizer_us(cost: CostModel, shards_bytes: int, layout: RankLayout) -> float:
    """AdamW on this rank's shards, and clipping."""
    ranks = group_shape(range(layout.world_size), cost.hardware.ranks_per_node)
    norm_us = cost.collective_us("all_reduce", 4, ranks)
    return cost.copy_us((_ADAMW_ACCESSES + _CLIPPING_ACCESSES) * shards_bytes) + norm_us


def _memory(problems: Sequence[Problem], choices: list[Choice], shards_bytes: int, accumulation: int) -> dict[str, int]:
    """The worse of the two programs, by category."""
    worst = max(range(2), key=lambda i: choices[i].simulation.peak_bytes)
    live = live_by_category(problems[worst], choices[worst].schedule)
    peak = max(live, key=sum)
    return {
        "parameters": shards_bytes,
        "optimizer": _MOMENTS * shards_bytes,
        "gradients": (shards_bytes if accumulation > 1 else 0) + peak.gradient_bytes + peak.reduced_bytes,
        "activations": peak.computation_bytes - shards_bytes,
        "gathered": peak.parameter_bytes,
        "buffers": peak.buffer_bytes,
    }
