"""What a plan file holds, as data: its fields have the names and the order of meaning of these classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from graphshard.graph.plan import END, Decision, PlannedBucket, PlannedStep, ProgramPlan
from graphshard.plan_file.outline import Outline, outline_hash
from graphshard.planner import Bucket, Schedule, ScheduledStep, StepKind

FORMAT = "graphshard-plan"
# To be raised with every change of the fields below.
VERSION = 1
_DIGITS = 3  # of times in microseconds


@dataclass(frozen=True)
class StoredStep:
    """A `PlannedStep`, and the position of the node that it happens before."""

    before: str
    position: int
    step: StepKind
    bucket: str


@dataclass(frozen=True)
class Prediction:
    """What the simulator said when the plan was made; nothing depends on it.

    Attributes:
        step_us: time of the program.
        lower_bound_us: no plan takes less.
        exposed_us: time that the computation waits.
        peak_bytes: most that is allocated.
    """

    step_us: float
    lower_bound_us: float
    exposed_us: float
    peak_bytes: int


@dataclass(frozen=True)
class StoredProgram:
    """The plan of one program, and what it was made for.

    Attributes:
        region: number of its region.
        flags: the run-time state that it serves, as a report says it.
        outline: the program without times; a plan fits a program with the same outline.
        outline_hash: its hash.
        buckets: in order of launch.
        steps: everything that happens to them, in program order.
        kept: of a forward: units that stay gathered until their backward; None: FSDP2's flags say.
        chosen: ``"search"``, or the baseline that won.
        budget_bytes: most that the program may allocate.
        predicted: by the simulator.
    """

    region: int
    flags: str
    outline: Outline
    outline_hash: str
    buckets: tuple[PlannedBucket, ...]
    steps: tuple[StoredStep, ...]
    kept: tuple[str, ...] | None
    chosen: str
    budget_bytes: int
    predicted: Prediction

    @property
    def name(self) -> str:
        """For people."""
        return program_name(self.region, self.outline.direction, self.flags)

    @property
    def plan(self) -> ProgramPlan:
        """As the passes take it."""
        steps = (PlannedStep(step.before, step.step, step.bucket) for step in self.steps)
        return ProgramPlan(self.buckets, tuple(steps))

    @property
    def schedule(self) -> Schedule:
        """As the planner takes it: members by index, in order of the outline."""
        index = {
            (kind, member.fqn): number
            for kind in ("gather", "reduce")
            for number, member in enumerate(member for member in self.outline.members if member.kind == kind)
        }
        number_of = {bucket.name: number for number, bucket in enumerate(self.buckets)}
        return Schedule(
            tuple(
                Bucket(bucket.kind, tuple(index[bucket.kind, member] for member in bucket.members))
                for bucket in self.buckets
            ),
            tuple(ScheduledStep(step.position, step.step, number_of[step.bucket]) for step in self.steps),
        )


@dataclass(frozen=True)
class Costs:
    """Costs that a plan was made with: name of the hardware, and fingerprint of all numbers."""

    name: str
    fingerprint: str


@dataclass(frozen=True)
class Plan:
    """The plans of a model's programs. `graphshard.load_plan` reads one, `graphshard.compile` replays it.

    Attributes:
        format, version: of the file.
        graphshard, torch: versions that it was made with.
        hardware: that it was made for.
        mode: ``"auto"`` or ``"fsdp2"``, as `graphshard.compile` was asked.
        budget_bytes: likewise; None: as much as FSDP2's plan.
        programs: by region, direction, flags and hash.
    """

    format: str
    version: int
    graphshard: str
    torch: str
    hardware: Costs
    mode: Literal["auto", "fsdp2"]
    budget_bytes: int | None
    programs: tuple[StoredProgram, ...]

    def find(self, region: int, direction: str, flags: str) -> tuple[StoredProgram, ...]:
        """Its programs of that name: several, where the flags' text does not tell them apart."""
        return tuple(
            program
            for program in self.programs
            if (program.region, program.outline.direction, program.flags) == (region, direction, flags)
        )

    def find_forward(self, region: int) -> StoredProgram | None:
        """A forward of a region; all of one region keep the same units gathered."""
        forwards = (p for p in self.programs if (p.region, p.outline.direction) == (region, "forward"))
        return next(forwards, None)


def program_name(region: int, direction: str, flags: str) -> str:
    """``region 0 forward [kept=3]``."""
    return f"region {region} {direction} [{flags}]"


def program_flags(flags: str, model: str) -> str:
    """The flags of a report without the name of the model, which counts the models of a process."""
    return flags.replace(f"{model}:", "")


def stored_program(region: int, flags: str, decision: Decision, outline: Outline) -> StoredProgram:
    """What a file holds of a decision.

    Args:
        region: number of the program's region.
        flags: the run-time state that it serves.
        decision: of the planner.
        outline: of its problem.
    """
    position = {op.name: number for number, op in enumerate(outline.ops)} | {END: len(outline.ops)}
    simulation = decision.choice.simulation
    return StoredProgram(
        region,
        flags,
        outline,
        outline_hash(outline),
        decision.plan.buckets,
        tuple(StoredStep(s.before, position[s.before], s.step, s.bucket) for s in decision.plan.steps),
        decision.kept,
        decision.choice.name,
        max(decision.budget_bytes, simulation.peak_bytes),  # a contract may ask for more than a rank's budget
        Prediction(
            round(float(simulation.step_us), _DIGITS),
            round(float(min(decision.choice.lower_bound_us, simulation.step_us)), _DIGITS),  # sums in other orders
            round(float(simulation.exposed_us), _DIGITS),
            simulation.peak_bytes,
        ),
    )


def ordered_programs(programs: list[StoredProgram]) -> tuple[StoredProgram, ...]:
    """Each once, in the order of a file."""
    named = {(p.region, p.outline.direction, p.flags, p.outline_hash): p for p in reversed(programs)}
    return tuple(named[name] for name in sorted(named))
