"""Problems and plans for tests of plan files: one that is written down, and random ones."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from graphshard.graph.plan import Decision
from graphshard.plan_file import Costs, Plan, ordered_programs, outline_of, stored_program
from graphshard.plan_file.contents import FORMAT, VERSION
from graphshard.planner import (
    Choice,
    GatherTask,
    OwnCollective,
    Problem,
    ReductionTask,
    Schedule,
    Transfer,
    fixed_size_schedule,
    fsdp2_schedule,
    lower_bound_us,
    per_parameter_schedule,
    simulate,
)
from graphshard.planning.named_plan import named_plan

# The same examples in every run, and no limit on the time of one: a busy machine fails nothing.
EXAMPLES = settings(max_examples=60)
RANKS = {"shards": 4, "copies": 2, "": 1}


def gather(fqn: str, first_use: int, num_bytes: int = 4096, **changes: Any) -> GatherTask:
    unit = fqn.rpartition(".")[0]
    transfer = Transfer(0, ((10.0, 0.01),))
    made = GatherTask(fqn, unit, 0, transfer, num_bytes, num_bytes, first_use, first_use, shard_bytes=num_bytes // 4)
    return replace(made, **changes)


def reduction(fqn: str, ready: int, num_bytes: int = 4096, **changes: Any) -> ReductionTask:
    unit = fqn.rpartition(".")[0]
    made = ReductionTask(fqn, unit, 1, Transfer(0, ((10.0, 0.01),)), num_bytes, num_bytes, num_bytes // 4, ready)
    return replace(made, **changes)


def backward(**changes: Any) -> Problem:
    """Two units, gathered and reduced in backward; the model has an all-reduce of its own."""
    made = Problem(
        "backward",
        ("mm", "relu", "mm_1", "sum"),
        (100.0, 20.0, 100.0, 5.0),
        (5000, 6000, 6000, 5000),
        (gather("blocks.1.weight", 0), gather("blocks.1.bias", 0, 64), gather("blocks.0.weight", 2)),
        (reduction("blocks.1.weight", 1), reduction("blocks.1.bias", 1, 64), reduction("blocks.0.weight", 4)),
        (OwnCollective("all_reduce", 1, 30.0, 1, 2),),
        ("shards", "copies"),
    )
    return replace(made, **changes)


def forward() -> Problem:
    """The gathers alone."""
    return backward(direction="forward", reductions=(), own=())


def decided(problem: Problem, schedule: Schedule, kept: tuple[str, ...] | None = None) -> Decision:
    simulation = simulate(problem, schedule)
    choice = Choice(schedule, simulation, lower_bound_us(problem), "search", ())
    return Decision(problem, choice, named_plan(problem, schedule), simulation.peak_bytes, kept)


def plan_of(*programs: tuple[int, str, Problem, Schedule], kept: tuple[str, ...] | None = None, **changes: Any) -> Plan:
    """The plan of programs: region, flags, problem and schedule of each. `kept`: by the forwards."""
    stored = []
    for region, flags, problem, schedule in programs:
        decision = decided(problem, schedule, kept if problem.direction == "forward" else None)
        stored.append(stored_program(region, flags, decision, outline_of(problem, RANKS.__getitem__)))
    costs = Costs("h100", "0123456789abcdef")
    made = Plan(FORMAT, VERSION, "0.1.0", "2.13.0", costs, "auto", None, ordered_programs(stored))
    return replace(made, **changes)


def backward_plan() -> Plan:
    return plan_of((0, "resident=1", backward(), fsdp2_schedule(backward())))


def wrapped(lines: Sequence[str]) -> str:
    return "\n".join(textwrap.fill(line, 110, subsequent_indent="    ", break_on_hyphens=False) for line in lines)


# --- random ones

NAMES = st.text('abc.é"\\', min_size=1, max_size=6)
TIMES = st.floats(0.0, 1e6, allow_nan=False)
NUM_BYTES = st.integers(0, 10**9)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    ops = draw(st.lists(NAMES, min_size=1, max_size=6, unique=True))
    streams = ("shards", "copies")[: draw(st.integers(1, 2))]
    end = len(ops)

    def transfer() -> Transfer:
        return Transfer(draw(st.integers(0, len(streams) - 1)), ((draw(TIMES), draw(TIMES)),))

    keys = [transfer() for _ in range(2)]
    gathers = []
    ready = draw(st.integers(0, end - 1))  # before any is used: the schedules here merge any of one unit
    for fqn in draw(st.lists(NAMES, max_size=5, unique=True)):
        key, first_use = draw(st.integers(0, 1)), draw(st.integers(ready, end - 1))
        last_use = draw(st.integers(first_use, end))
        found = gather(fqn, first_use, draw(NUM_BYTES), key=key, ready=ready, last_use=last_use, transfer=keys[key])
        gathers.append(replace(found, alone_out_bytes=draw(NUM_BYTES), copy_in_us=draw(TIMES)))
    reductions: list[ReductionTask] = []
    then = transfer() if draw(st.booleans()) else None
    for fqn in draw(st.lists(NAMES, max_size=5, unique=True)):
        key = draw(st.integers(0, 1))
        moved = {"key": 2 + key, "transfer": keys[key], "then": then}
        reductions.append(reduction(fqn, draw(st.integers(0, end)), draw(NUM_BYTES), **moved))
    return Problem(
        draw(st.sampled_from(["forward", "backward", "inference"])),
        tuple(ops),
        tuple(draw(TIMES) for _ in ops),
        tuple(draw(NUM_BYTES) for _ in ops),
        tuple(sorted(gathers, key=lambda found: found.first_use)),
        tuple(sorted(reductions, key=lambda found: found.ready)),
        streams=streams,
        contention=draw(st.floats(0.0, 2.0)),
    )


@st.composite
def schedules(draw: st.DrawFn, problem: Problem) -> Schedule:
    make = draw(st.sampled_from([fsdp2_schedule, per_parameter_schedule, None]))
    return fixed_size_schedule(problem, draw(NUM_BYTES)) if make is None else make(problem)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    programs = []
    for _ in range(draw(st.integers(1, 3))):
        problem = draw(problems())
        flags = draw(st.sampled_from(["default", "kept=2", "resident=1 é"]))
        programs.append((draw(st.integers(0, 2)), flags, problem, draw(schedules(problem))))
    return plan_of(
        *programs,
        kept=draw(st.sampled_from([None, ()])),
        mode=draw(st.sampled_from(["auto", "fsdp2"])),
        budget_bytes=draw(st.none() | NUM_BYTES),
    )
