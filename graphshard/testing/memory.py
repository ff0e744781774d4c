"""Bytes of gathered parameters and of unreduced gradients while a lowered program runs: counted, and seen.

`count_memory` walks a lowered graph in order and frees each value behind its last use, as the generated code does.
`watch_memory` puts probes into programs that run as they are (backend ``"aot_eager"``), which look at what is really
allocated. Both count whole allocations: views of one are one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef

from graphshard.graph.emit_reduction import ALL_REDUCE_BUCKET
from graphshard.graph.ir import Collective, collective, launches, output_args, val, waits_of
from graphshard.graph.liveness import Allocation, allocations_of, value_of
from graphshard.lowering import driver
from graphshard.passes.apply_flags import HELD
from graphshard.passes.apply_residency import RESIDENT

Role = Literal["gathered", "unreduced"]
# In the place of a unit: of arguments and results, the graph does not say which unit's they are.
ARGUMENTS, RESULTS = "arguments", "results"
PATIENCE_S = 1.0


class Tracked(NamedTuple):
    """What one allocation is for. `unit` is the name of its unit, ``""`` for the root's, `ARGUMENTS` or `RESULTS`."""

    role: Role
    unit: str


@dataclass(frozen=True)
class Moment:
    """What is allocated while one node runs.

    Attributes:
        node: its name.
        step: what it is to a collective: ``"copy_in"``, ``"launch"``, ``"wait"``, ``"copy_out"``, or ``""``.
        live: bytes by role and unit.
    """

    node: str
    step: str
    live: Mapping[Tracked, int]

    def total(self, role: Role) -> int:
        """Bytes of one role."""
        return sum(count for tracked, count in self.live.items() if tracked.role == role)

    def units(self, role: Role) -> frozenset[str]:
        """Units of which something of this role is allocated."""
        return frozenset(tracked.unit for tracked in self.live if tracked.role == role)


@dataclass(frozen=True)
class MemoryUse:
    """One run of a program, or a forecast of it: a moment for each node, in order."""

    direction: str
    moments: tuple[Moment, ...]

    def peak(self, role: Role) -> Moment:
        """The first moment of most bytes."""
        return max(self.moments, key=lambda moment: moment.total(role))


def count_memory(gm: GraphModule, direction: str, *, grads_only: bool = False) -> MemoryUse:
    """Counts what a lowered graph holds, from the graph alone.

    Gathered are the outputs of all-gathers and what is copied out of them, and gathered parameters that come as
    arguments. Unreduced are gradients from where they are computed, what is copied of them for a reduction, until the
    wait of that reduction, and those of earlier backwards that come as arguments. Arguments are freed behind their last
    use, results never.

    Args:
        gm: after all passes.
        direction: of the program.
        grads_only: whether all results of a backward graph are gradients of parameters. Then those that are not
            reduced are counted, too: the graph does not tell them from the gradients of inputs.
    """
    nodes = list(gm.graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    allocations = allocations_of(gm.graph)
    tracked = _tracked(gm.graph, allocations, grads_only and direction == "backward")
    end: dict[Allocation, int] = {}
    for node in nodes:
        for allocation in allocations[node]:
            end[allocation] = max(end.get(allocation, 0), position[node], *(position[user] for user in node.users))
    for launch in launches(gm.graph):  # a collective reads its input until it is awaited
        wait = max(position[wait] for wait in waits_of(launch))
        for source in launch.all_input_nodes:
            for allocation in allocations[source]:
                end[allocation] = max(end[allocation], wait)
    changes: list[dict[Tracked, int]] = [{} for _ in range(len(nodes) + 1)]
    for allocation, what in tracked.items():
        count = _bytes(value_of(val(allocation.node), allocation.place), what)
        start = position[allocation.node]
        changes[start][what] = changes[start].get(what, 0) + count
        stop = end[allocation] + 1
        changes[stop][what] = changes[stop].get(what, 0) - count
    live: dict[Tracked, int] = {}
    moments = []
    for node, change in zip(nodes, changes, strict=False):
        live = {what: count for what in {**live, **change} if (count := live.get(what, 0) + change.get(what, 0))}
        if node.op != "placeholder":
            moments.append(Moment(node.name, node.meta.get("role", ""), live))
    return MemoryUse(direction, tuple(moments))


def _bytes(value: Tensor, what: Tracked) -> int:
    """Of an argument, without the padding that may lie behind it: a graph does not show it."""
    return value.nbytes if what.unit == ARGUMENTS else int(value.untyped_storage().nbytes())


def _tracked(graph: Graph, allocations: Mapping[Node, list[Allocation]], grads_only: bool) -> dict[Allocation, Tracked]:
    ours = [(launch, found) for launch in launches(graph) if (found := collective(launch)) is not None]
    first: dict[str, Collective] = {}  # of two collectives of a bucket, the second reads what is reduced
    for _, found in ours:
        first[found.bucket] = found
    tracked: dict[Allocation, Tracked] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            if node.name.startswith((RESIDENT, HELD)):
                role: Role = "gathered" if node.name.startswith(RESIDENT) else "unreduced"
                tracked.update(dict.fromkeys(allocations[node], Tracked(role, ARGUMENTS)))
            continue
        bucket_name, step = node.meta.get("bucket_of", ""), node.meta.get("role")
        if (bucket := first.get(bucket_name)) is None:
            continue
        if bucket.kind == "all_gather":
            if step != "copy_in":
                own = [allocation for allocation in allocations[node] if allocation.node is node]
                tracked.update(dict.fromkeys(own, Tracked("gathered", bucket.unit)))
        elif step in ("copy_in", "launch") and not bucket_name.endswith(ALL_REDUCE_BUCKET):
            read = [allocation for source in node.all_input_nodes for allocation in allocations[source]]
            own = allocations[node] if step == "copy_in" else []
            tracked.update(
                (allocation, Tracked("unreduced", bucket.unit))
                for allocation in (*read, *own)
                if allocation.node.op != "placeholder"
            )
    if grads_only:
        reduced = {node for node in graph.nodes if node.meta.get("role") == "copy_out"}
        for result in output_args(graph):
            if isinstance(result, Node) and result not in reduced:
                for allocation in allocations[result]:
                    tracked.setdefault(allocation, Tracked("unreduced", RESULTS))
    return tracked


def _weak(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


@dataclass
class _Probes:
    """What the probes of one program look at, and what they see."""

    counted: MemoryUse
    tracked: dict[str, list[tuple[int | None, Tracked]]]  # by name of the node that allocates
    patience_s: float = PATIENCE_S
    watched: list[tuple[StorageWeakRef, int, Tracked]] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)

    def look(self, names: Sequence[str], values: Sequence[Any]) -> None:
        """Sees the results of the nodes `names`: the first of them has just run."""
        for name, value in zip(names, values, strict=True):
            for index, what in self.tracked.get(name, ()):
                tensor = value_of(value, index)
                self.watched.append((_weak(tensor), _bytes(tensor, what), what))
        want = self.counted.moments[len(self.moments)]
        live = self._live()
        while self.patience_s > 0 and any(
            live[what] > want.live.get(what, 0) for what in live if what.unit != ARGUMENTS
        ):  # gloo's thread may let go of a tensor a little later
            time.sleep(0.001)
            self.patience_s -= 0.001
            live = self._live()
        self.moments.append(Moment(want.node, want.step, live))
        if want is self.counted.moments[-1]:
            self.watched.clear()

    def _live(self) -> dict[Tracked, int]:
        self.watched = [seen for seen in self.watched if not seen[0].expired()]  # type: ignore[no-untyped-call]
        live: dict[Tracked, int] = {}
        for _, count, what in {seen[0].cdata: seen for seen in self.watched}.values():
            live[what] = live.get(what, 0) + count
        return live


_probes: dict[int, _Probes] = {}
_numbers = itertools.count()


def _probe(number: int, names: Sequence[str], values: Sequence[Any], others: Sequence[Any]) -> None:
    """A node of a watched program. It reads `others`, what the node before it read, so that they are still there."""
    if (probes := _probes.get(number)) is not None:
        probes.look(names, values)


@contextmanager
def watch_memory(*, grads_only: bool = False) -> Iterator[list[tuple[MemoryUse, MemoryUse]]]:
    """Watches programs that are lowered inside, while they run inside: what was counted, and what was seen.

    What it yields is filled at the end, for each program in the order of lowering; `grads_only` as in `count_memory`.
    A program must run as it is, and once: backend ``"aot_eager"``. That one holds its arguments to the end, where
    Inductor's code frees them behind their last use.
    """
    watched: dict[int, _Probes] = {}

    def add_probes(gm: GraphModule, direction: str) -> None:
        counted = count_memory(gm, direction, grads_only=grads_only)
        graph, number = gm.graph, next(_numbers)
        tracked: dict[str, list[tuple[int | None, Tracked]]] = {}
        for allocation, what in _tracked(graph, allocations_of(graph), grads_only and direction == "backward").items():
            tracked.setdefault(allocation.node.name, []).append((allocation.place, what))
        watched[number] = _probes[number] = _Probes(counted, tracked)
        arguments = [node for node in graph.nodes if node.op == "placeholder" and node.name in tracked]
        for node in [node for node in graph.nodes if node.op != "placeholder"]:
            is_output = node.op == "output"
            values = [*([] if is_output else [node]), *arguments]
            names = [node.name, *(argument.name for argument in arguments)]
            with graph.inserting_before(node) if is_output else graph.inserting_after(node):
                graph.call_function(_probe, (number, names, [None] * is_output + values, node.all_input_nodes))
            arguments = []  # the first probe has seen them

    results: list[tuple[MemoryUse, MemoryUse]] = []
    try:
        with driver.after_lowering(add_probes):
            yield results
    finally:
        for number, probes in watched.items():
            results.append((probes.counted, MemoryUse(probes.counted.direction, tuple(probes.moments))))
            del _probes[number]
