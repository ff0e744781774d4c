"""Llama 3 8B traced and lowered as for GPUs, on tensors without data: as far as there is a way without a GPU.

The tensors' device is the CPU: `fully_shard` asks for the current CUDA device of a mesh of GPUs, which torch has only
where there is one. What lowering does for GPUs is on: fused copies, seams, an H100's costs; all-gathers have no outputs
made for gloo. Inductor's passes behind the partitioner, and what it generates, would be those of the CPU and are left
out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor, nn

from bench.compile.phases import LEAST_SHARE
from graphshard.compat.compile_phases import (
    AOT_AUTOGRAD,
    DYNAMO,
    LOWERING,
    PARTITIONER,
    exclusive_seconds,
    timed_seconds,
)
from graphshard.cost import HARDWARE, CostModel, GroupShape
from graphshard.graph.ir import Flags, PassContext, shard_placeholder, unshards
from graphshard.graph.stretches import Stretch, cut, undivided
from graphshard.lowering.within_budget import lower_within_budget
from graphshard.planning.extraction import Scene
from graphshard.planning.planning import Planning, RegionPlanning
from graphshard.scale.checkpointing import block_runner
from graphshard.scale.decoder import DecoderSize
from graphshard.scale.presets import PRESETS, Preset, decoder
from graphshard.scale.trace import TRACED_SHARDS, TracedProgram, trace_step

MODEL, HARDWARE_ROW = "llama3-8b", "h100"
TINY = decoder("tiny", DecoderSize(64, 2, 4, 2, 128, 256), 32)


@dataclass(frozen=True)
class FakeRow:
    """One depth, forward and backward together.

    Attributes:
        nodes: of the lowered graphs.
        traces_s: seconds of Dynamo and AOTAutograd.
        partitioner_s: of the partitioner, and of graphshard's passes on the joint graph.
        front_passes_s: of Inductor's passes on Dynamo's graph and the joint one.
        passes_s: of graphshard's passes on both programs, and their checks.
        planner_s: of its planner.
        stretches: that the programs are cut into.
        different: of them: what Inductor would compile.
    """

    model: str
    blocks: int
    nodes: int
    traces_s: float
    partitioner_s: float
    front_passes_s: float
    passes_s: float
    planner_s: float
    stretches: int
    different: int


def fake_row(blocks: int, preset: Preset = PRESETS[MODEL]) -> FakeRow:
    """Traces and lowers a model of so many blocks.

    Raises:
        RuntimeError: a program cannot be cut into stretches.
    """

    def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
        return preset.build(blocks, preset.tokens, block_runner("none")), preset.inputs(1, preset.tokens)

    before_s, start_s = timed_seconds(), time.perf_counter()
    traced = trace_step(build)
    traced_s = time.perf_counter() - start_s
    timed_s = {name: seconds - before_s.get(name, 0.0) for name, seconds in timed_seconds().items()}
    phases = exclusive_seconds(timed_s, LEAST_SHARE * traced_s)
    scene = Scene(CostModel(HARDWARE[HARDWARE_ROW]), lambda name: GroupShape(TRACED_SHARDS, 1))
    planner = RegionPlanning(Planning(scene))
    passes_s, nodes, stretches, keys = 0.0, 0, 0, set()
    for program in (traced.forward, traced.backward):
        context = _context(program)
        lowered, _ = lower_within_budget(program.gm, context, f"fake.{program.direction}", planner, "default")
        graph = lowered.gm.graph
        if why := undivided(graph):
            raise RuntimeError(f"bench: {preset.name}: the {program.direction} is not cut into stretches: {why}")
        found = [step for step in cut(graph) if isinstance(step, Stretch)]
        passes_s += lowered.passes_s
        nodes += len(graph.nodes)
        stretches += len(found)
        keys |= {(program.direction, *step.key()) for step in found}
    return FakeRow(
        preset.name,
        blocks,
        nodes,
        phases[DYNAMO] + phases[AOT_AUTOGRAD],
        phases[PARTITIONER],
        phases[LOWERING],
        passes_s,
        planner.spent_s,
        stretches,
        len(keys),
    )


def _context(program: TracedProgram) -> PassContext:
    gathered = {shard_placeholder(node).name for node in unshards(program.gm.graph)}
    stays = tuple(name for name in program.params if name in program.stays & gathered)
    flags = Flags(kept=stays) if program.direction == "forward" else Flags(resident=stays)
    return PassContext(program.direction, program.params, flags, outlines=True, fuses=True)
