"""One planned program: everything that is explained, as it was planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from graphshard.planner import (
    GatherTask,
    LiveBytes,
    Problem,
    Schedule,
    Simulation,
    Tasks,
    is_coalesced,
    live_by_category,
)


@dataclass(frozen=True)
class PlannedProgram:
    """One program, its schedule and what the simulator says about it.

    Attributes:
        title: such as ``"region 0 forward"``.
        problem, schedule, simulation, lower_bound_us: as the planner has them; the three must belong together.
        plan: ``"auto"``, ``"fsdp2"``, or the path of a plan file.
        bucket_names: one for each bucket of the schedule, such as ``"gather:layers.0"``.
        baselines: (name, time in us, peak bytes) of other schedules of the same problem.
        budget_bytes: that the plan had to keep; None: none was given.
        measured: bucket, or collective of the model's own -> medians of real runs, in us: when it was launched, when
            its wait was over, both from the program's start, and how long the computation waited; None: none.

    Raises:
        ValueError: the number of names is not that of the buckets.
    """

    title: str
    problem: Problem
    schedule: Schedule
    simulation: Simulation
    lower_bound_us: float
    plan: str
    bucket_names: tuple[str, ...]
    baselines: tuple[tuple[str, float, int], ...] = ()
    budget_bytes: int | None = None
    measured: Mapping[str, tuple[float, float, float]] | None = None

    def __post_init__(self) -> None:
        if len(self.bucket_names) != len(self.schedule.buckets):
            raise ValueError(
                f"PlannedProgram: bucket_names of {self.title!r}: got {len(self.bucket_names)}, "
                f"want {len(self.schedule.buckets)}, one for each bucket of its schedule"
            )

    @cached_property
    def live(self) -> tuple[LiveBytes, ...]:
        """What is allocated at each position, by category."""
        return live_by_category(self.problem, self.schedule)

    @cached_property
    def buckets(self) -> tuple[BucketRow, ...]:
        """All buckets, in order of launch."""
        return _bucket_rows(self)

    def op_name(self, position: int) -> str:
        """The node before which something at `position` happens."""
        ops = self.problem.ops
        return ops[position] if position < len(ops) else "the end"

    def awaited_before(self, row: BucketRow) -> str:
        """The nodes before which a bucket's collectives are awaited."""
        return ", ".join(dict.fromkeys(self.op_name(position) for position in row.waits_at))

    def stream_name(self, stream: int) -> str:
        """The process group of a stream, in words."""
        name = self.problem.streams[stream] if stream < len(self.problem.streams) else ""
        return f"group {name}" if name else "communication"


@dataclass(frozen=True)
class BucketRow:
    """What happens to one bucket.

    Attributes:
        index: into the schedule's buckets.
        name: of the bucket.
        kind: ``"all-gather"``, ``"reduction"`` or ``"reduction + all-reduce"``; the first two may be coalesced.
        fqns: of its parameters, in order.
        wire_bytes: of the full tensor that is sent.
        launch_at: position of its launch.
        waits_at: position of its wait, and of that for the all-reduce that follows.
        start_us, end_us: of the collective, of both where an all-reduce follows.
        sent_us: how long its collectives take.
        exposed_us: how long the computation waits for it.
        measured: (launched, wait over, waited) in us, None for none.
    """

    index: int
    name: str
    kind: str
    fqns: tuple[str, ...]
    wire_bytes: int
    launch_at: int
    waits_at: tuple[int, ...]
    start_us: float
    end_us: float
    sent_us: float
    exposed_us: float
    measured: tuple[float, float, float] | None


def kind_of(members: Tasks) -> str:
    """The collective of a bucket with these members, in words."""
    coalesced = "coalesced " if is_coalesced(members) else ""
    if isinstance(members[0], GatherTask):
        return f"{coalesced}all-gather"
    return f"{coalesced}reduction" if members[0].then is None else "reduction + all-reduce"


def _bucket_rows(program: PlannedProgram) -> tuple[BucketRow, ...]:
    schedule, count = program.schedule, len(program.schedule.buckets)
    launch_at = [0] * count
    waits_at: list[list[int]] = [[] for _ in range(count)]
    for step in schedule.steps:
        if step.kind == "launch":
            launch_at[step.bucket] = step.before
        else:
            waits_at[step.bucket].append(step.before)
    spans: list[list[tuple[float, float]]] = [[] for _ in range(count)]
    exposed_us = [0.0] * count
    for event in program.simulation.events:
        if event.bucket >= 0 and event.what == "collective":
            spans[event.bucket].append((event.start_us, event.end_us))
        elif event.bucket >= 0 and event.what == "exposed":
            exposed_us[event.bucket] += event.end_us - event.start_us
    rows = []
    for index, name in enumerate(program.bucket_names):
        members = schedule.members(program.problem, index)
        rows.append(
            BucketRow(
                index=index,
                name=name,
                kind=kind_of(members),
                fqns=tuple(member.fqn for member in members),
                wire_bytes=sum(member.wire_bytes for member in members),
                launch_at=launch_at[index],
                waits_at=tuple(waits_at[index]),
                start_us=min(start for start, _ in spans[index]),
                end_us=max(end for _, end in spans[index]),
                sent_us=sum(end - start for start, end in spans[index]),
                exposed_us=exposed_us[index],
                measured=(program.measured or {}).get(name),
            )
        )
    return tuple(rows)
