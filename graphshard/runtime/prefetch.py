"""What happens between regions: a region launches the first gathers of the next one, and the last reduction of a region
goes on behind it.

The order of regions is recorded in one pass, compared with that of the other ranks, and followed from then on. What is
launched is a function of the calls so far, so it is the same on every rank.
Gathers are launched one region ahead, or as many as `memory_budget` has room for.
Source: FSDP2's implicit prefetch, one unit ahead, and its one reduce-scatter under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple, Protocol

import torch

from graphshard.agree.agreement import Posted, post_to_group
from graphshard.agree.consensus import Contracts
from graphshard.compat.autograd import backward_id, call_at_end_of_backward
from graphshard.fsdp2 import Unit
from graphshard.planner import Problem, choose_depth
from graphshard.planning.planning import Planning
from graphshard.reporting.report import Report
from graphshard.runtime.orders import Order, Orders, Step, Walk
from graphshard.state.calls import Backward, Entry
from graphshard.state.dispatch import KEEP, Binding
from graphshard.state.holdings import Holdings
from graphshard.state.shards import Shard

# How far ahead regions are looked for that still need their gathers.
HORIZON = 8


class Graph(Protocol):
    """What matters here of a graph with markers."""

    part: str
    gather_order: tuple[int, ...]
    reduced: dict[int, int]
    last_reduced: int | None


class Wanted(NamedTuple):
    """What a step gathers of one unit; `whole`: the unit is gathered as a whole, for several regions."""

    unit: Unit
    shards: Sequence[Shard]
    whole: bool


class Prefetch:
    """Gathers and reduces between the regions of one model.

    Args:
        holdings: of the model.
        report: of the model.
        every: whether all units that are whole in a region are gathered and reduced outside its programs, so that equal
            blocks share them wherever they stand; else only what a region before can launch.
        model: name of the model.
        contracts: of the model.
        planning: of the model; chooses how many regions ahead gathers are launched.
    """

    def __init__(
        self,
        holdings: Holdings,
        report: Report,
        every: bool,
        model: str,
        contracts: Contracts,
        planning: Planning | None = None,
    ) -> None:
        self._holdings = holdings
        self._report = report
        self._every = every
        self._model = model
        self._contracts = contracts
        self._planning = planning
        self._problems: dict[Step, Callable[[], Problem | None]] = {}
        self._orders: Orders[Wanted] = Orders()
        self._posted: dict[int, list[Posted]] = {}  # by identity of an order
        self._forward: Walk[Wanted] | None = None
        self._backward: Walk[Wanted] | None = None
        self._backward_id = -1
        self._follows = False  # whether the running backward follows a known order of several steps

    # -- passes

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the outermost forward; its regions are recorded if it ends well."""
        if self._holdings.in_backward:  # a checkpoint is recomputed: a part of that backward
            yield
            return
        if self._backward_id != -1:  # a backward that failed
            self._backward, self._backward_id = None, -1
            self._holdings.finish_reductions()
        self._holdings.drop_ahead()
        mode = "with" if torch.is_grad_enabled() else "without"
        self._forward = self._orders.begin(f"forward of '{self._holdings.entry.name}' {mode} gradients")
        try:
            yield
            self._end(self._forward)
        finally:
            self._forward = None
            self._holdings.drop_ahead()

    def _depth(self, order: Order[Wanted]) -> int:
        """As planned within `memory_budget`; without one there is only room for FSDP2's one."""
        planning = self._planning
        if planning is None or planning.mode != "auto" or planning.budget_bytes is None:
            return order.depth
        budget_bytes = planning.budget_bytes

        def decide() -> str:
            problems = [problem for step in order.steps if (problem := self._problems[step]()) is not None]
            return str(choose_depth(problems, budget_bytes).depth if problems else order.depth)

        what = f"how far ahead regions of the {order.kind} are gathered"
        depth = int(self._contracts.settle("\n".join((what, *map(str, order.steps))), what, decide))
        if depth > 1:
            self._report.note_once(f"{order.kind}: gathers are launched {depth} regions ahead, within memory_budget")
        return depth

    def _backward_walk(self, entry: Entry) -> Walk[Wanted] | None:
        if (number := backward_id()) != self._backward_id:
            # One backward inside another, as of reentrant checkpoints: neither is followed.
            inside = self._backward_id != -1
            self._backward = None if inside else self._orders.begin(f"backward of '{entry.name}'")
            self._backward_id, self._follows = number, False
            call_at_end_of_backward(self._end_backward)
        return self._backward

    def _end_backward(self) -> None:
        if self._backward is not None:
            self._end(self._backward)
        self._backward, self._backward_id, self._follows = None, -1, False
        self._holdings.drop_ahead()

    def _end(self, walk: Walk[Wanted]) -> None:
        order = self._orders.end(walk)
        if order is None or id(order) in self._posted or len(order.steps) < 2 or not any(order.gathers):
            return  # nothing to launch ahead: ranks may differ
        groups: dict[str, set[str]] = {}
        for gathers in order.gathers:
            for name, (unit, *_) in gathers.items():
                for group in filter(None, (unit.group_name, unit.replicate_group_name)):
                    groups.setdefault(group, set()).add(name)
        what = f"{self._model}: {walk.kind}"
        posts = (post_to_group(group, what, _lines(order, names)) for group, names in sorted(groups.items()))
        self._posted[id(order)] = [posted for posted in posts if posted is not None]

    # -- before a program runs

    def outside(self, binding: Binding) -> frozenset[Unit]:
        """Units that are gathered outside a forward of `binding`, whatever ran before it."""
        if not self._every:
            return frozenset()
        return frozenset(unit for unit in binding.units if unit not in binding.parts and _is_plain(unit))

    def before_forward(
        self, graph: Graph, binding: Binding, split: frozenset[Unit], problem: Callable[[], Problem | None]
    ) -> None:
        """Gathers what a forward needs from outside, and launches gathers of the next regions.

        Args:
            graph: about to run.
            binding: its shards.
            split: units that are gathered as a whole.
            problem: of `graph`, to plan with those of other regions.
        """
        if not binding.units:
            return
        holdings = self._holdings
        wanted = self._wanted(graph, binding, split)
        holdings.finish_gathers(binding.units)
        for unit, shards, whole in wanted:
            if whole or self._every:
                holdings.gather(unit, shards, whole or holdings.behind_forward(unit) == KEEP, ahead=False)
        walk = self._backward_walk(holdings.entry) if holdings.in_backward else self._forward
        self._launch(walk, "forward", binding, wanted, problem)

    def before_backward(
        self,
        graph: Graph,
        binding: Binding,
        split: frozenset[Unit],
        asked: Backward,
        problem: Callable[[], Problem | None],
    ) -> None:
        """The same for a backward. `asked`: of it.

        Behind that of a whole call nothing is launched: a rank that follows it may not have its graph.
        """
        holdings = self._holdings
        if graph.part or not binding.units:
            holdings.finish_gathers(binding.units)
            for unit, _ in binding.in_order(graph.part, graph.gather_order):
                if unit in split:
                    holdings.gather_whole(unit)
            return
        wanted = self._wanted(graph, binding, split)
        holdings.finish_gathers(binding.units)
        for unit, shards, whole in wanted:
            if whole or self._every:
                holdings.gather(unit, shards, whole or not unit.reshard_after_backward, ahead=False)
        is_whole_call = asked.role is not None and asked.role.leg is None
        walk = None if is_whole_call else self._backward_walk(asked.entry)
        self._launch(walk, "backward", binding, wanted, problem)

    def _wanted(self, graph: Graph, binding: Binding, split: frozenset[Unit]) -> list[Wanted]:
        """What can be gathered before the program, of what is not gathered now.

        That is split units, and all whole ones or the first one that the program would gather.
        """
        wanted, leads = [], True
        for unit, own in binding.in_order(graph.part, graph.gather_order):
            shards: Sequence[Shard] = own
            if unit in split:
                if unit.world_size == 1:
                    continue
                shards = self._holdings.shards_of(unit)
            elif unit in binding.parts or not (self._every or leads) or not _is_plain(unit):
                continue
            if any(map(_is_missing, shards)):
                wanted.append(Wanted(unit, shards, unit in split))
                leads = leads and unit in split
        return wanted

    def _launch(
        self,
        walk: Walk[Wanted] | None,
        direction: str,
        binding: Binding,
        wanted: list[Wanted],
        problem: Callable[[], Problem | None],
    ) -> None:
        holdings = self._holdings
        ahead: list[Wanted] = []
        if walk is not None:
            step = Step(direction, tuple(unit.name for unit in holdings.in_order(binding.unit_set)))
            self._problems.setdefault(step, problem)
            order = walk.follow(step, {found.unit.name: found for found in wanted})
            if order is not None:
                self._agree(order)
                ahead = self._following(order, len(walk.steps) - 1)
            elif walk.expected is not None:
                self._report.note_once(
                    f"{walk.kind}: ran {step} where {walk.expected} was known to follow: nothing is gathered ahead "
                    "behind it"
                )
                walk.expected = None
            if walk is self._backward:
                self._follows = order is not None and len(order.steps) > 1
        chosen = [found for unit in binding.units for found in self._chosen(unit, direction, binding)]
        if direction == "backward" and chosen:
            ahead = []  # as in FSDP2, a choice replaces what would be prefetched in backward
        for unit, shards, whole in (*chosen, *ahead):
            if direction == "forward":
                stays = holdings.behind_forward(unit) == KEEP
            else:
                stays = not unit.reshard_after_backward
            holdings.gather(unit, shards, whole or stays, ahead=True)

    def _following(self, order: Order[Wanted], position: int) -> list[Wanted]:
        """What the next regions need that have anything to gather."""
        found: list[Wanted] = []
        depth = 0
        for gathers in islice(order.following(position), HORIZON):
            if missing := [wanted for wanted in gathers if _is_missing(wanted.shards[0])]:
                found += missing
                if (depth := depth + 1) == order.depth:
                    break
        return found

    def _agree(self, order: Order[Wanted]) -> None:
        if not order.agreed and (posts := self._posted.get(id(order))) is not None:
            for posted in posts:
                posted.compare()
            order.agreed, order.depth = True, self._depth(order)

    def _chosen(self, unit: Unit, direction: str, binding: Binding) -> list[Wanted]:
        """Units of other regions that the user chose to prefetch."""
        settings = unit.settings()
        names = settings.forward_prefetch if direction == "forward" else settings.backward_prefetch
        found = []
        for name in names:
            other = self._holdings.unit_named(name)
            if other not in binding.unit_set and _is_plain(other):
                found.append(Wanted(other, self._holdings.shards_of(other), other in self._holdings.split))
        return found

    def say_ignored(self, binding: Binding) -> None:
        """Names the choices of users that cannot be followed."""
        for unit in binding.units:
            settings = unit.settings()
            others = map(self._holdings.unit_named, (*settings.forward_prefetch, *settings.backward_prefetch))
            names = {other.name for other in others if other not in binding.unit_set and not _is_plain(other)}
            if names:
                self._report.say_once(
                    f"unit '{unit.name or 'root'}' prefetches {', '.join(sorted(names))}, gathered by another region"
                )

    # -- behind a backward

    def reduced_behind(
        self, graph: Graph, binding: Binding, split: frozenset[Unit], asked: Backward
    ) -> frozenset[Unit]:
        """Units whose gradients are left to `Holdings.launch_reduction`, to be reduced while the next region runs."""
        if graph.part or asked.inputs_only or not graph.reduced:
            return frozenset()
        if self._every:
            units: Sequence[Unit] = binding.units
        elif self._follows and graph.last_reduced is not None:
            units = [binding.shards[graph.last_reduced].unit]
        else:
            return frozenset()
        return frozenset(
            unit
            for unit in units
            if unit not in split and unit not in binding.parts and self._can_reduce_behind(unit, asked)
        )

    def _can_reduce_behind(self, unit: Unit, asked: Backward) -> bool:
        settings = unit.settings()
        return (
            unit.reduce_grads
            and not unit.reduce_unused
            and unit.world_size * unit.replicas > 1
            and settings.all_reduce
            and not settings.all_reduce_hook
            and not settings.custom_reduce_scatter
            and not any(
                shard in asked.again or shard.pending is not None or shard.partial is not None
                for shard in self._holdings.shards_of(unit)
            )
        )


def _is_plain(unit: Unit) -> bool:
    """Whether a unit can be gathered outside programs: no shards over a smaller group, no all-gather of a user's."""
    return unit.world_size > 1 and unit.post_forward_mesh is None and not unit.settings().custom_all_gather


def _is_missing(shard: Shard) -> bool:
    """Whether a parameter is not gathered, not even over a smaller group."""
    return shard.full is None and shard.post_forward is None


def _lines(order: Order[Wanted], names: set[str]) -> list[str]:
    """The steps that use the units `names`, as far as they do."""
    lines = [order.kind]
    for step in order.steps:
        if own := tuple(name for name in step.units if name in names):
            lines.append(str(Step(step.direction, own)))
    return lines
