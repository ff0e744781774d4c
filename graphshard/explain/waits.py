"""Why the computation waits for a collective, in plain words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from graphshard.explain.program import PlannedProgram, kind_of
from graphshard.explain.quantities import format_bytes, format_us
from graphshard.planner import Event, GatherTask, ReductionTask
from graphshard.planner.memory import freed_by_wait, held_by_launch


@dataclass(frozen=True)
class Wait:
    """The computation stands still until one collective is done.

    Attributes:
        name: of the bucket, or of the model's own collective.
        bucket: index of the bucket, -1 for none.
        kind: the collective, in words.
        exposed_us: how long.
        reason: of the simulator, such as ``"queue"``.
        cause: two or three words.
        why: a sentence or two.
    """

    name: str
    bucket: int
    kind: str
    exposed_us: float
    reason: str
    cause: str
    why: str


@dataclass(frozen=True)
class _Case:
    """One wait: where its collective is launched and awaited, when it runs, and behind what on its process group.

    `behind` is done at `free_us`; 0: there is none.
    """

    program: PlannedProgram
    bucket: int
    launch_at: int
    wait_at: int
    start_us: float
    end_us: float
    exposed_us: float
    stream: int
    behind: str
    free_us: float
    is_all_reduce: bool

    @property
    def members(self) -> list[GatherTask] | list[ReductionTask]:
        return list(self.program.schedule.members(self.program.problem, self.bucket))  # type: ignore[return-value]

    @property
    def ready_at(self) -> int:
        return max(member.ready for member in self.members)

    @property
    def hiding_us(self) -> float:
        """Computation between launch and wait."""
        elapsed = self.program.problem.elapsed_us
        return elapsed[self.wait_at] - elapsed[self.launch_at]

    @property
    def sent(self) -> str:
        """``64.0 MiB take 1.2 ms``."""
        item = "shard_bytes" if self.is_all_reduce else "wire_bytes"
        num_bytes = sum(getattr(member, item) for member in self.members)
        return f"its {format_bytes(num_bytes)} take {format_us(self.end_us - self.start_us)}"

    @property
    def held_up(self) -> str:
        """``, sent behind gather:root, which ends at 5.1 ms``; nothing where it starts as it is launched."""
        if self.free_us and self.start_us == self.free_us:
            return f", sent behind {self.behind}, which ends at {format_us(self.free_us)}"
        return ""

    def op(self, position: int) -> str:
        return quoted_op(self.program, position)


# Behind the name of a bucket: the all-reduce that follows its reduce-scatter.
ALL_REDUCE = " (all-reduce)"


def quoted_op(program: PlannedProgram, position: int) -> str:
    """The node at a position as a sentence says it: in backquotes, or ``the end``."""
    name = program.op_name(position)
    return f"`{name}`" if position < len(program.problem.ops) else name


def waits_of(program: PlannedProgram) -> tuple[Wait, ...]:
    """Every wait that costs time, the longest first."""
    found = [*_bucket_waits(program), *_own_waits(program)]
    return tuple(sorted(found, key=lambda wait: -wait.exposed_us))


def collectives_in_order(program: PlannedProgram) -> Iterator[tuple[Event, str]]:
    """Every collective, in order of launch, with its name; those of the model itself carry their own."""
    own: dict[int, list[str]] = defaultdict(list)
    for collective in program.problem.own:
        own[collective.stream].append(collective.name)
    for event in program.simulation.events:
        if event.what == "collective":
            yield event, program.bucket_names[event.bucket] if event.bucket >= 0 else own[event.stream].pop(0)


def _bucket_waits(program: PlannedProgram) -> Iterator[Wait]:
    runs: dict[int, list[tuple[Event, str, float]]] = defaultdict(list)
    last_on: dict[int, tuple[str, float]] = {}
    for event, name in collectives_in_order(program):
        runs[event.bucket].append((event, *last_on.get(event.stream, ("", 0.0))))
        last_on[event.stream] = (name, event.end_us)
    awaits = [step for step in program.schedule.steps if step.kind != "launch"]
    for step, exposure in zip(awaits, program.simulation.exposures, strict=False):  # behind them: the model's own
        event, behind, free_us = runs[step.bucket][step.kind == "finish"]
        if exposure.exposed_us <= 0.0:
            continue
        case = _Case(
            program, step.bucket, event.position, step.before, event.start_us, event.end_us, exposure.exposed_us,
            event.stream, behind, free_us, step.kind == "finish",
        )  # fmt: skip
        cause, why = _REASONS[exposure.reason](case)
        kind = kind_of(case.members)
        if "+" in kind:
            kind = "all-reduce" if case.is_all_reduce else "reduction"
        name = program.bucket_names[step.bucket] + (ALL_REDUCE if case.is_all_reduce else "")
        yield Wait(name, step.bucket, kind, exposure.exposed_us, exposure.reason, cause, why)


def _own_waits(program: PlannedProgram) -> Iterator[Wait]:
    for exposure in program.simulation.exposures:
        if exposure.reason == "own":
            own = program.problem.own[exposure.bucket]
            why = (
                f"The model itself launches it before {quoted_op(program, own.launch)} and needs it before "
                f"{quoted_op(program, own.wait)} (tensor parallelism, for example); a plan leaves it where it is."
            )
            yield Wait(own.name, -1, "the model's own", exposure.exposed_us, "own", "the model's own", why)


def _head(case: _Case) -> tuple[str, str]:
    why = f"The program begins with {case.op(case.wait_at)}, which needs it: nothing is computed yet that could hide it"
    alpha_us = min(case.members[0].transfer.alpha_us, case.end_us - case.start_us)
    return "nothing before it", f"{why}; {case.sent}, of which {format_us(alpha_us)} are latency{case.held_up}."


def _tail(case: _Case) -> tuple[str, str]:
    elapsed = case.program.problem.elapsed_us
    if case.is_all_reduce:
        why = "It follows a reduce-scatter that is awaited behind the last computation"
    elif elapsed[case.ready_at] == elapsed[-1]:
        why = "Its last gradient is only computed at the very end"
    else:
        why = f"It could start before {case.op(case.ready_at)}, but is launched behind the last computation"
    return "nothing behind it", f"{why}: nothing is left to hide it; {case.sent}{case.held_up}."


def _queue(case: _Case) -> tuple[str, str]:
    due = format_us(case.end_us - case.exposed_us)
    if isinstance(case.members[0], GatherTask):
        needed = f"{case.op(case.wait_at)} was due at {due}"
    elif case.wait_at < len(case.program.problem.ops):
        needed = f"it is awaited before {case.op(case.wait_at)}, at {due}, which frees its buffers"
    else:
        needed = f"the computation ended at {due}"
    return "queued", (
        f"Launched before {case.op(case.launch_at)}, it could start only at {format_us(case.start_us)}, when "
        f"{case.behind} was done on {case.program.stream_name(case.stream)}; {case.sent}, but {needed}."
    )


def _late(case: _Case) -> tuple[str, str]:
    what = f"{case.sent[0].upper()}{case.sent[1:]}"
    if case.hiding_us:
        between = f"{format_us(case.hiding_us)} of computation between its launch, before {case.op(case.launch_at)},"
        facts = f"{what}, but there are only {between} and its wait, before {case.op(case.wait_at)}"
    else:
        facts = f"{what}, and it is awaited where it is launched, before {case.op(case.wait_at)}"
    if case.is_all_reduce:
        return "launched late", f"{facts}. It follows a reduce-scatter, and is launched as soon as that is awaited."
    if isinstance(case.members[0], ReductionTask):
        return _late_reduction(case, facts)
    earlier = _early_enough(case)
    if earlier is None and case.launch_at and case.program.problem.elapsed_us[case.launch_at]:
        return "not ready earlier", f"{facts}. Its shards are not ready before that launch."
    if earlier is None:
        return "nothing before it", f"{facts}. No computation comes before its launch."
    held_bytes = held_by_launch(case.members)[0]
    live_bytes = max(case.program.simulation.live_bytes[earlier : case.launch_at])
    budget_bytes = case.program.budget_bytes
    if budget_bytes is not None and live_bytes + held_bytes > budget_bytes:
        return "no memory earlier", (
            f"{facts}. A launch before {case.op(earlier)} would hold {format_bytes(held_bytes)} beside "
            f"{format_bytes(live_bytes)} in use, more than the budget of {format_bytes(budget_bytes)}."
        )
    return "launched late", f"{facts}. {_PLACED.get(case.program.plan, 'The plan places its launch there.')}"


def _late_reduction(case: _Case, facts: str) -> tuple[str, str]:
    elapsed = case.program.problem.elapsed_us
    at_end = elapsed[case.wait_at] == elapsed[-1]
    if at_end and _early_enough(case) is None:
        return "nothing behind it", f"{facts}. Its last gradient is not ready before that launch."
    if at_end:
        return "launched late", f"{facts}. It could be launched before {case.op(case.ready_at)}."
    freed_bytes = freed_by_wait(case.members)
    return "awaited early", f"{facts}. A later wait would hold the {format_bytes(freed_bytes)} that it frees longer."


def _early_enough(case: _Case) -> int | None:
    """The last position from which computation would hide it all, or else the first where it is ready.

    None: no computation lies between that position and the launch.
    """
    elapsed = case.program.problem.elapsed_us
    position = case.launch_at
    while position > case.ready_at and elapsed[case.wait_at] - elapsed[position] < case.end_us - case.start_us:
        position -= 1
    return position if elapsed[position] < elapsed[case.launch_at] else None


_PLACED = {
    "auto": "The search found no place for its launch that makes the program faster.",
    "fsdp2": "FSDP2 gathers one unit ahead, no earlier.",
}
_REASONS = {"head": _head, "tail": _tail, "queue": _queue, "late": _late}
