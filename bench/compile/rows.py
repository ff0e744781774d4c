"""Rows of `bench.compile`: numbers that can be compared. No process, no clock: tested without."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.compile.phases import PASSES, PLANNER, TRACES, phase_seconds
from bench.compile.samples import FirstStep
from bench.harness.disturbance import is_disturbed
from bench.harness.systems import System

PEER, PEER_BACKEND = "fsdp2+compile", "inductor"
# Relative, of the first step's loss and of the norm of all gradients. All systems begin with the same parameters and
# read the same text: float32 sums in another order (ulp 1.2e-7), nothing more.
TOLERANCE = 1e-4
# From which on a deep model is compared with a deeper one: what is compiled once is compiled by then.
FROM_BLOCKS = 12


@dataclass(frozen=True)
class CompileRow:
    """The first step of one case, on the slower rank; the keys of the JSON file are these names.

    Attributes:
        system, backend, plan, regions: that trained; a plan of None: not graphshard.
        blocks: of the decoder.
        cache: ``"cold"``: Inductor's cache was empty; ``"warm"``: other processes had run the same case.
        step_s: forward and backward, compilation included.
        cpu_s: processor seconds of it.
        second_step_s: the next step.
        phases: seconds of `step_s` by phase, in `ALL_PHASES`.
        graphs: given to Inductor on one rank.
        kernels: different C++ sources that were compiled, on all ranks together.
        programs: of graphshard.
        ratio: of `step_s` to that of FSDP2 with compiled blocks, as deep, of the same `cache`; None: not measured, or
            of another backend.
        to_cold: of a warm row: of `step_s` to that of the cold one.
        disturbed: whether other programs ran.
    """

    system: str
    backend: str
    plan: str | None
    regions: str | None
    blocks: int
    cache: str
    step_s: float
    cpu_s: float
    second_step_s: float
    phases: Mapping[str, float]
    graphs: int
    kernels: int
    programs: int
    ratio: float | None
    to_cold: float | None
    disturbed: bool

    @property
    def label(self) -> str:
        """The system in words."""
        return self.system if self.plan is None else f"{self.system}, plan {self.plan}, regions {self.regions}"

    @property
    def traces_s(self) -> float:
        """Seconds in which the model is traced."""
        return sum(self.phases[name] for name in TRACES)

    @property
    def others_s(self) -> float:
        """Seconds of everything else."""
        return self.step_s - self.traces_s

    @property
    def own_share(self) -> float:
        """Of graphshard's passes and planner in the step."""
        return (self.phases[PASSES] + self.phases[PLANNER]) / self.step_s


Cases = Mapping[System, Mapping[str, Sequence[FirstStep]]]


def compile_rows(blocks: int, cases: Cases) -> list[CompileRow]:
    """Rows of one depth: of each system one for each state of the cache, in order.

    Args:
        blocks: of the decoder.
        cases: by system and state of the cache, the first steps by rank.
    """
    slower = {
        system: {state: max(by_rank, key=lambda first: first.step_s) for state, by_rank in states.items()}
        for system, states in cases.items()
    }
    peer = next((states for system, states in slower.items() if system.name == PEER), {})
    rows = []
    for system, states in slower.items():
        for state, first in states.items():
            is_warm = state == "warm"
            rows.append(
                CompileRow(
                    system.name,
                    system.backend,
                    system.plan,
                    None if system.plan is None else system.regions,
                    blocks,
                    state,
                    first.step_s,
                    first.cpu_s,
                    first.second_step_s,
                    phase_seconds(first),
                    first.graphs,
                    max(f.kernels for f in cases[system][state]),
                    first.programs,
                    first.step_s / peer[state].step_s if state in peer and system.backend == PEER_BACKEND else None,
                    first.step_s / states["cold"].step_s if is_warm else None,
                    # Ranks wait for each other's kernels, but one of them always works.
                    is_disturbed(first.step_s, sum(f.cpu_s for f in cases[system][state])),
                )
            )
    return rows


@dataclass(frozen=True)
class GrowthRow:
    """A system from one depth to the deepest, cold.

    Attributes:
        label, backend: of the system.
        traces_s_per_block: seconds of Dynamo's and AOTAutograd's traces for each added block.
        others: ratio of the seconds of everything else.
        whole: ratio of the seconds of the whole step.
        passes_exponent: n where the passes' seconds grow as blocks ** n; None where graphshard has no part.
    """

    label: str
    backend: str
    from_blocks: int
    to_blocks: int
    traces_s_per_block: float
    others: float
    whole: float
    passes_exponent: float | None


def growth_rows(rows: Sequence[CompileRow]) -> list[GrowthRow]:
    """One row for each system with at least two depths, from `FROM_BLOCKS`, or else the second smallest that is not the
    deepest, to the deepest.
    """
    by_system: dict[tuple[str, str], list[CompileRow]] = {}
    for row in sorted(rows, key=lambda row: row.blocks):
        if row.cache == "cold":
            by_system.setdefault((row.backend, row.label), []).append(row)
    growth = []
    for (backend, label), (*shallower, deepest) in by_system.items():
        if not shallower:
            continue
        base = next((row for row in shallower if row.blocks == FROM_BLOCKS), shallower[min(1, len(shallower) - 1)])
        slope = (deepest.traces_s - base.traces_s) / (deepest.blocks - base.blocks)
        others, whole = deepest.others_s / base.others_s, deepest.step_s / base.step_s
        exponent = _exponent(base, deepest)
        growth.append(GrowthRow(label, backend, base.blocks, deepest.blocks, slope, others, whole, exponent))
    return growth


def _exponent(few: CompileRow, many: CompileRow) -> float | None:
    if few.plan is None:
        return None
    return math.log(many.phases[PASSES] / few.phases[PASSES]) / math.log(many.blocks / few.blocks)


def check_losses(blocks: int, cases: Cases) -> None:
    """Checks that all systems computed the same first step, over all ranks.

    Raises:
        RuntimeError: naming the first that did not.
    """
    found = {
        f"{system}, {state}": (
            statistics.fmean(first.loss for first in by_rank),
            statistics.fmean(first.grad_norm for first in by_rank),
        )
        for system, states in cases.items()
        for state, by_rank in states.items()
    }
    (wanted, want), *_ = found.items()
    for title, got in found.items():
        for what, ours, theirs in zip(("loss", "norm of the gradients"), got, want, strict=True):
            if not math.isclose(ours, theirs, rel_tol=TOLERANCE):
                raise RuntimeError(
                    f"bench: {title}, {blocks} blocks: {what} of the first step: got {ours}, want that of {wanted}, "
                    f"{theirs}, within {TOLERANCE:.0e}, relative"
                )
