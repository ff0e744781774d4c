"""A plan: which parameters of a program share a collective, and where each is launched and awaited. Data, no graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from graphshard.planner import Choice, Problem, StepKind

END = ""  # in the place of a node: the end of the program


@dataclass(frozen=True)
class PlannedBucket:
    """One collective, or a reduce-scatter and the all-reduce behind it.

    Attributes:
        name: unique in the program.
        kind: which of the two.
        members: FQNs of its parameters, in order; ``fqn#2`` is the second marker of a parameter in the program.
    """

    name: str
    kind: Literal["gather", "reduce"]
    members: tuple[str, ...]


@dataclass(frozen=True)
class PlannedStep:
    """Something that happens to a bucket.

    Attributes:
        before: name of the node that it happens before, `END` for the end; several there happen in the plan's order.
        step: what happens, see `StepKind` of the planner.
        bucket: its name.
    """

    before: str
    step: StepKind
    bucket: str


@dataclass(frozen=True)
class ProgramPlan:
    """Buckets of one program, in order of launch, and all their steps, in program order."""

    buckets: tuple[PlannedBucket, ...]
    steps: tuple[PlannedStep, ...]


@dataclass(frozen=True)
class Decision:
    """What was planned for one program.

    Attributes:
        problem: that was solved.
        choice: its solution.
        plan: the same, in names.
        budget_bytes: most that the program may allocate.
        kept: of a forward: units that the planner keeps gathered until their backward; None: FSDP2's flags say.
    """

    problem: Problem
    choice: Choice
    plan: ProgramPlan
    budget_bytes: int
    kept: tuple[str, ...] | None = None


def bucket_name(kind: str, units: Sequence[str], taken: Counter[str]) -> str:
    """A name of a bucket that no other of the program has. `taken`: those of the others; it gets this one."""
    names = [unit or "root" for unit in units]
    name = f"{kind}:{names[0]}" + (f"..{names[-1]}" if len(names) > 1 else "")
    taken[name] += 1
    return name + (f"#{taken[name]}" if taken[name] > 1 else "")
