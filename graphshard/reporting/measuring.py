"""What collectives really took: launches and waits of programs, seen by torch's profiler.

A program's launches and waits run in the order of its graph, whatever compiled it: the n-th event of a run belongs to
the n-th launch or wait of the graph.
"""

from __future__ import annotations

import itertools
import operator
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch.fx import Graph, Node
from torch.profiler import ProfilerActivity, profile, record_function

from graphshard.compat.profiler import profiler_active
from graphshard.graph.gather_outputs import GATHER_INTO
from graphshard.graph.ir import (
    COALESCED_ALL_GATHER,
    COALESCED_REDUCE_SCATTER,
    LAUNCHES,
    WAIT,
    collective,
    is_call,
    launches,
)
from graphshard.reporting.named_events import named_events
from graphshard.reporting.report import Launched, NamedShard, ProgramRecord

_PREFIX = "graphshard::program "
_EVENTS = {f"_c10d_functional::{target.overloadpacket.__name__}" for target in (*LAUNCHES, GATHER_INTO, WAIT)}
_measured: ContextVar[dict[str, ProgramRecord] | None] = ContextVar("measured", default=None)
_numbers = itertools.count()


class Timing(NamedTuple):
    """When one collective of a program ran, in microseconds from the program's start: medians of the runs.

    Attributes:
        launch_us: its launch began.
        done_us: its wait was over.
        waited_us: of that, the program stood still.
    """

    launch_us: float
    done_us: float
    waited_us: float


def communication_order(graph: Graph) -> tuple[tuple[str, str], ...]:
    """(``"launch"`` or ``"wait"``, bucket) of a lowered graph, in order; the model's own collectives by node name."""
    return tuple((what, _name(launch)) for what, launch in _communication(graph))


def communication_facts(graph: Graph, shards: Sequence[NamedShard]) -> dict[str, Any]:
    """What a `ProgramRecord` holds of the launches and waits of a graph, lowered for the parameters of `shards`."""
    found = [collective(launch) for _, launch in _communication(graph)]
    return {
        "order": communication_order(graph),
        "carried": tuple(
            ("", ()) if carried is None else (carried.group, tuple(member.fqn for member in carried.members))
            for carried in found
        ),
        "launched": _launched(graph),
        "parameters": tuple((shard.unit.name, shard.fqn) for shard in shards),
    }


def _launched(graph: Graph) -> tuple[Launched, ...]:
    found, waited = [], False
    for what, launch in _communication(graph):
        waited = waited or what == "wait"
        sent = collective(launch)
        if what == "launch" and sent is not None:
            coalesced = launch.target in (COALESCED_ALL_GATHER, COALESCED_REDUCE_SCATTER)
            kind, dtype = f"{'coalesced ' if coalesced else ''}{sent.kind}", str(sent.dtype).removeprefix("torch.")
            members = tuple((member.fqn, member.shard_numel) for member in sent.members)
            found.append(Launched(kind, sent.group, sent.world_size, dtype, sent.op or "", members, waited))
    return tuple(found)


def _communication(graph: Graph) -> Iterator[tuple[str, Node]]:
    """The launches of a graph, and the launch of each wait; the wait itself, where that is of another kind."""
    known = set(launches(graph))
    for node in graph.nodes:
        if node in known:
            yield "launch", node
        elif is_call(node, WAIT):
            source = node.args[0]
            if is_call(source, operator.getitem):  # one of several tensors
                source = source.args[0]
            yield "wait", source if source in known else node  # type: ignore[misc]


def _name(node: Node) -> str:
    return node.name if (found := collective(node)) is None else found.bucket


def timed(record: ProgramRecord, shards: Sequence[NamedShard]) -> AbstractContextManager[Any]:
    """Marks one run of a program, if someone measures, and names its collectives, if someone else profiles."""
    found = _measured.get()
    if found is None:
        return named_events(record, shards) if profiler_active() else nullcontext()
    name = f"{_PREFIX}{next(_numbers)}"
    found[name] = record
    return record_function(name)


@contextmanager
def measured_programs() -> Iterator[None]:
    """Times every launch and wait of the programs that run inside; `ProgramRecord.timings` holds the medians after."""
    if profiler_active():
        outer = "another" if _measured.get() is not None else "a torch profiler"
        raise RuntimeError(f"measure: got one inside {outer}, want one at a time: torch has one profiler")
    runs: dict[str, ProgramRecord] = {}
    token = _measured.set(runs)
    try:
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            yield
    finally:
        _measured.reset(token)
    events = [event for event in profiler.events() or () if event.name in runs or event.name in _EVENTS]
    samples: dict[int, dict[str, list[Timing]]] = {}
    records = {id(record): record for record in runs.values()}
    for run in (event for event in events if event.name in runs):
        start, end = run.time_range.start, run.time_range.end
        inside = sorted(
            (event.time_range.start - start, event.time_range.end - start)
            for event in events
            if event.name in _EVENTS and event.thread == run.thread and start <= event.time_range.start <= end
        )
        record = runs[run.name]
        if len(inside) == len(record.order):
            for bucket, timing in waits_together(record.order, inside).items():
                samples.setdefault(id(record), {}).setdefault(bucket, []).append(timing)
    for number, by_bucket in samples.items():
        records[number].timings = {bucket: _median(timings) for bucket, timings in by_bucket.items()}


def waits_together(order: Sequence[tuple[str, str]], spans: Sequence[tuple[float, float]]) -> Mapping[str, Timing]:
    """The timing of each bucket in a run, from the (begin, end) of its launches and waits in order."""
    launched: dict[str, float] = {}
    found: dict[str, Timing] = {}
    for (what, bucket), (start_us, end_us) in zip(order, spans, strict=True):
        if what == "launch":
            launched[bucket] = start_us
        elif bucket in launched:
            waited_us = found[bucket].waited_us if bucket in found else 0.0  # for the tensors before
            found[bucket] = Timing(launched[bucket], end_us, waited_us + end_us - start_us)
    return found


def _median(timings: Sequence[Timing]) -> Timing:
    return Timing(*(statistics.median(values) for values in zip(*timings, strict=True)))
