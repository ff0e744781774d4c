"""What `bench.schedule` plans: models on numbers of ranks, and what each of their programs is to a planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from bench.schedule.deep_graph import deepened
from bench.schedule.known_costs import KnownCosts
from graphshard.cost import Hardware
from graphshard.planner import Problem, fsdp2_schedule, simulate
from graphshard.planning.extraction import Scene, extract_problem
from graphshard.scale.checkpointing import block_runner
from graphshard.scale.decoder import DecoderSize
from graphshard.scale.model_size import Repetition, shard_sizes
from graphshard.scale.presets import PRESETS, Preset, decoder
from graphshard.scale.repeat import TRACED_BLOCKS, coarsened, repeated
from graphshard.scale.resize import RankLayout, program_on
from graphshard.scale.trace import Traced, TracedProgram, trace_step

# AdamW's, in the dtype of the parameters; the parameters themselves are arguments of each program.
MOMENTS = 2


@dataclass(frozen=True)
class CaseModel:
    """A model and how it is trained: one sequence on each rank.

    Attributes:
        preset: the model.
        checkpointing: what of a block is computed again in backward: ``"none"``, ``"selective"`` or ``"full"``.
    """

    preset: Preset
    checkpointing: str

    @property
    def name(self) -> str:
        """Of the preset."""
        return self.preset.name


_ALL = (
    CaseModel(PRESETS["llama3-8b"], "selective"),
    CaseModel(PRESETS["llama3-70b"], "full"),
    CaseModel(decoder("wide-shallow", DecoderSize(12288, 8, 96, 8, 36864, 32000), 4096), "selective"),
    CaseModel(decoder("narrow-deep", DecoderSize(1024, 96, 16, 4, 4096, 32000), 4096), "none"),
)
MODELS: Mapping[str, CaseModel] = {model.name: model for model in _ALL}
QUICK = CaseModel(decoder("tiny", DecoderSize(64, 6, 4, 2, 128, 256), 32), "none")


@dataclass(frozen=True)
class TracedModel:
    """A model's programs, of a few blocks that stand for all.

    Attributes:
        model: what was traced.
        traced: its programs.
        repetition: the blocks.
        costs: by direction; of the nodes as they were traced.
    """

    model: CaseModel
    traced: Traced
    repetition: Repetition
    costs: Mapping[str, KnownCosts]


@dataclass(frozen=True)
class CaseProgram:
    """One program to plan.

    Attributes:
        program: its graph, of a few blocks.
        problem: of the whole depth.
        scene: machine and process groups.
    """

    program: TracedProgram
    problem: Problem
    scene: Scene


@dataclass(frozen=True)
class Case:
    """A model on a number of ranks.

    Attributes:
        traced: the model.
        layout: of the ranks.
        programs: forward and backward.
        states_bytes: of what a rank holds besides what its programs allocate: the optimizer's moments.
    """

    traced: TracedModel
    layout: RankLayout
    programs: tuple[CaseProgram, ...]
    states_bytes: int

    @property
    def name(self) -> str:
        """Such as ``"llama3-8b/w64"``."""
        return f"{self.traced.model.name}/w{self.layout.world_size}"

    def fsdp2_bytes(self) -> int:
        """What FSDP2's schedules of both programs allocate: what `graphshard.compile` allows by default."""
        return max(simulate(p.problem, fsdp2_schedule(p.problem)).peak_bytes for p in self.programs)

    def deep_program(self, planned: CaseProgram) -> TracedProgram:
        """A program's graph of the whole depth."""
        repetition = self.traced.repetition
        return deepened(planned.program, repetition.units, repetition.layers)


def trace_model(model: CaseModel, hardware: Hardware) -> TracedModel:
    """Traces a model once, whatever the number of ranks.

    Raises:
        ValueError: it cannot be traced.
    """
    preset = model.preset
    blocks = min(preset.layers, TRACED_BLOCKS)

    def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
        return preset.build(blocks, preset.tokens, block_runner(model.checkpointing)), preset.inputs(1, preset.tokens)

    traced = trace_step(build)
    units = sorted({p.unit for p in traced.params if p.unit}, key=lambda unit: int(unit.rpartition(".")[2]))
    costs = {p.direction: KnownCosts(hardware, p.gm.graph) for p in (traced.forward, traced.backward)}
    return TracedModel(model, traced, Repetition(tuple(units), preset.layers), costs)


def make_case(traced: TracedModel, world_size: int) -> Case:
    """The case of a model on `world_size` ranks.

    Raises:
        NotRepeated: the model's blocks differ.
    """
    layout, repetition = RankLayout(world_size), traced.repetition
    sizes = shard_sizes(traced.traced, repetition, layout)
    programs = []
    for program in (traced.traced.forward, traced.traced.backward):
        cost = traced.costs[program.direction]
        scene = Scene(cost, layout.group_shapes(cost.hardware.ranks_per_node))
        problem = extract_problem(*program_on(program, layout), scene)
        if repetition.extra:
            problem = repeated(problem, repetition.units, repetition.layers, sizes.block_bytes)
        programs.append(CaseProgram(program, coarsened(problem), scene))
    return Case(traced, layout, tuple(programs), MOMENTS * sizes.num_bytes)
