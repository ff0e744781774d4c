"""What happened, for users who ask afterwards: programs, their collectives and their cost, and everything that is not
compiled.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from graphshard.graph.plan import Decision

log = logging.getLogger(__name__)


class NamedUnit(Protocol):
    """What is asked of a unit."""

    name: str


class NamedShard(Protocol):
    """What is asked of the shard of one parameter."""

    fqn: str

    @property
    def unit(self) -> NamedUnit: ...


class Launched(NamedTuple):
    """What one collective of a program sends, as all ranks of its process group know it.

    Attributes:
        kind: ``"all_gather"``, ``"reduce_scatter"`` or ``"all_reduce"``, ``"coalesced "`` in front of it if it takes
            several tensors.
        group: name of the process group; names of sibling groups differ.
        ranks: how many are in it.
        dtype: that is sent.
        op: of a reduction: ``"avg"`` or ``"sum"``; of a gather: empty.
        members: (FQN, elements of one rank's part) of each parameter.
        behind_wait: whether the program waits for another collective before.
    """

    kind: str
    group: str
    ranks: int
    dtype: str
    op: str
    members: tuple[tuple[str, int], ...]
    behind_wait: bool


@dataclass
class ProgramRecord:
    """One lowered program.

    Attributes:
        region: number of the region it was lowered from; -1: it gathers or reduces whole units, outside any region.
        direction: ``"forward"``, ``"backward"`` or ``"inference"``; ``"unshard"`` or ``"reduce"`` for whole units.
        flags: the run-time state that it serves.
        runs: how often it ran.
        collectives: launches of one run by kind: ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``.
        passes_s: seconds in graphshard's passes and their checks, without the planner's.
        compile_s: seconds in the compiler behind them.
        planner_s: seconds in which it was planned, and what stays gathered behind it.
        ir: the lowered graph, one line per node.
        code: what the compiler made of it, if it keeps its source.
        decision: what was planned for it, if anything was.
        order: (``"launch"`` or ``"wait"``, bucket) of its graph, in order.
        carried: for each entry of `order`, the process group and the parameters in it; neither for the model's own.
        launched: the collectives that it sends, in order, without the model's own.
        parameters: (unit, FQN) of those whose shards the program was lowered for.
        computed: (operator, unit) of its graph, in order, if it runs operator by operator.
        timings: by bucket, when it was launched and done in a run and how long the run waited, in us from its start:
            medians, if `graphshard.measure` saw it run.
    """

    region: int
    direction: str
    flags: str
    collectives: dict[str, int]
    passes_s: float
    compile_s: float
    runs: int = 0
    planner_s: float = 0.0
    ir: str = field(default="", repr=False)
    code: str | None = field(default=None, repr=False)
    decision: Decision | None = field(default=None, repr=False)
    order: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    carried: tuple[tuple[str, tuple[str, ...]], ...] = field(default=(), repr=False)
    launched: tuple[Launched, ...] = field(default=(), repr=False)
    parameters: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    computed: tuple[tuple[object, str], ...] = field(default=(), repr=False)
    timings: Mapping[str, tuple[float, float, float]] = field(default_factory=dict, repr=False)

    @property
    def where(self) -> str:
        """What it was lowered from, in words."""
        units = len({unit for unit, _ in self.parameters})
        return f"region {self.region}" if self.region >= 0 else "one unit" if units == 1 else f"{units} units"

    def carried_for(self, position: int, shards: Sequence[NamedShard]) -> tuple[str, tuple[str, ...]]:
        """The bucket of an entry of `order` and the parameters in it, in a run for `shards`: equal blocks share it."""
        bucket, fqns = self.order[position][1], self.carried[position][1]
        name_of = self._names_for(shards)
        kind, colon, units = bucket.partition(":")
        return f"{kind}{colon}{self.units_for(units, shards)}", tuple(name_of.get(fqn, fqn) for fqn in fqns)

    def units_for(self, units: str, shards: Sequence[NamedShard]) -> str:
        """What units of the program (``"layers.0"``, or from the first to the last, ``"layers.0..layers.2"``) are in a
        run for `shards`.
        """
        pairs = zip(self.parameters, shards, strict=False)
        unit_of = {unit or "root": shard.unit.name or "root" for (unit, _), shard in pairs}
        return "..".join(unit_of.get(unit, unit) for unit in units.split(".."))

    def launched_for(self, shards: Sequence[NamedShard]) -> tuple[Launched, ...]:
        """What `launched` is in a run for `shards`."""
        name_of = self._names_for(shards)
        return tuple(
            sent._replace(members=tuple((name_of.get(fqn, fqn), numel) for fqn, numel in sent.members))
            for sent in self.launched
        )

    def _names_for(self, shards: Sequence[NamedShard]) -> dict[str, str]:
        return {fqn: shard.fqn for (_, fqn), shard in zip(self.parameters, shards, strict=False)}


@dataclass
class Report:
    """What a compiled model did so far. Ask for it with `graphshard.report(model)`.

    Attributes:
        programs: every program lowered so far.
        regions: number of regions that Dynamo captured.
        captured_again: of regions whose code was captured before: the guard of Dynamo's that did not hold.
        one_calls: graphs besides them that are one call of torch's without parameters: they run as they are.
        eager_unshards: FQN -> reads outside any graph; the parameter's whole unit is gathered then.
        eager_reductions: FQN -> gradients of such reads; they are reduced with the rest of the unit.
        fallbacks: one line for each thing that is not compiled or that is ignored, by name.
        notes: one line for each thing that runs in programs, but not as the model's graphs would have it.
        joint_passes_s: seconds in passes on joint graphs, all regions.
        units: which units were found besides the root, and why: a line for each container and class; none if users
            chose them.
        twins: calls of blocks that Dynamo did not trace: each is alike one that it has traced.
        traced_once: (blocks, bodies) of equal blocks of regions: how many there are, and how many were traced.
    """

    programs: list[ProgramRecord] = field(default_factory=list)
    regions: int = 0
    captured_again: dict[int, str] = field(default_factory=dict)
    one_calls: int = 0
    eager_unshards: Counter[str] = field(default_factory=Counter)
    eager_reductions: Counter[str] = field(default_factory=Counter)
    fallbacks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    joint_passes_s: float = 0.0
    units: list[str] = field(default_factory=list)
    twins: int = 0
    traced_once: tuple[int, int] = (0, 0)

    @property
    def collectives(self) -> dict[str, int]:
        """Launches so far, by kind."""
        total: Counter[str] = Counter()
        for program in self.programs:
            for kind, count in program.collectives.items():
                total[kind] += count * program.runs
        return dict(total)

    @property
    def runs(self) -> int:
        """How often programs have run."""
        return sum(program.runs for program in self.programs)

    def reset_counts(self) -> None:
        """Sets the counters of runs to zero."""
        for program in self.programs:
            program.runs = 0
        self.eager_unshards.clear()
        self.eager_reductions.clear()

    def say_once(self, line: str) -> None:
        """Logs a warning the first time, and keeps it in `fallbacks`."""
        _say_once(self.fallbacks, line)

    def note_once(self, line: str) -> None:
        """Logs a warning the first time, and keeps it in `notes`."""
        _say_once(self.notes, line)

    def accumulates_sharded(self, why: str) -> None:
        """Notes that gradients do not stay unreduced."""
        self.note_once(f"gradients are accumulated sharded, reduced in every backward: {why}")

    def traces_once(self, blocks: int, bodies: int) -> None:
        """Counts blocks that share the trace of a body."""
        self.traced_once = self.traced_once[0] + blocks, self.traced_once[1] + bodies

    def __str__(self) -> str:
        lines = [f"{self.regions} regions, {len(self.programs)} programs"]
        if self.one_calls:
            lines[0] += f"; graphs of one call without parameters, which run as they are: {self.one_calls}"
        if self.traced_once[0]:
            lines[0] += "; of {} equal blocks {} traced".format(*self.traced_once)
        if self.twins:
            lines[0] += f"; {self.twins} calls of blocks captured as those of their twins"
        lines += [f"  {line}" for line in self.units]
        for p in self.programs:
            counts = ", ".join(f"{count} {kind}" for kind, count in p.collectives.items() if count) or "no collective"
            lines.append(
                f"  {p.where} {p.direction:9} [{p.flags}] {p.runs} runs: {counts}; "
                f"passes {p.passes_s * 1e3:.0f} ms, planner {p.planner_s * 1e3:.0f} ms, "
                f"compile {p.compile_s:.1f} s"
            )
        lines += [
            f"  region {number} was captured again: a guard failed: {why}"
            for number, why in self.captured_again.items()
        ]
        if self.eager_unshards:
            lines.append(f"  read outside graphs: {by_place(self.eager_unshards)}")
        if self.eager_reductions:
            lines.append(f"  gradients of such reads: {by_place(self.eager_reductions)}")
        return "\n".join(lines + [f"  {line}" for line in (*self.fallbacks, *self.notes)])


def by_place(counts: Mapping[str, int]) -> dict[str, int]:
    """Counts of places (FQNs), of those that differ in numbers together: ``{"layers.*.weight": 24}``."""
    alike: dict[str, list[str]] = {}
    for place in counts:
        alike.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", place), []).append(place)
    return {
        name if len(places) > 1 else places[0]: sum(counts[place] for place in places) for name, places in alike.items()
    }


def _say_once(lines: list[str], line: str) -> None:
    if line not in lines:
        lines.append(line)
        log.warning("graphshard: %s", line)
