"""What happens between regions: gathers that later regions need are launched, and reductions go on behind a region.

In an order that all ranks are known to have (see `region_orders`) units are gathered and reduced together, as was
planned for the whole pass, or, without a plan, each alone, one region ahead.
Source: FSDP2's implicit prefetch, one unit ahead, and its one reduce-scatter under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Protocol

from graphshard.fsdp2 import Unit
from graphshard.runtime.orders import MakesRun, PassStep, RunningPass
from graphshard.runtime.region_orders import Followed, RegionOrders, Wanted, is_missing
from graphshard.state.binding import Binding
from graphshard.state.calls import BackwardRequest
from graphshard.state.holdings import Holdings
from graphshard.state.model_context import ModelContext
from graphshard.state.shards import Shard
from graphshard.state.unit_state import KEEP

# How far ahead regions are looked for that still need their gathers.
HORIZON = 8


class GatherOrder(Protocol):
    """What matters here of a graph with markers."""

    part: str
    gather_order: tuple[int, ...]
    reduced: dict[int, int]
    last_reduced: int | None
    tangents: list[str]


class Prefetch:
    """Gathers and reduces between the regions of one model.

    Args:
        context: of the model.
        holdings: of the model.
        every: whether all units that are whole in a region are gathered and reduced outside its programs, so that equal
            blocks share them wherever they stand; else only what a region before can launch.

    Attributes:
        orders: in which regions run.
    """

    def __init__(self, context: ModelContext, holdings: Holdings, every: bool) -> None:
        self._report = context.report
        self._holdings = holdings
        self._every = every
        self._step: RunningPass[Wanted] | None = None
        self._brought: set[Unit] = set()
        self.orders = RegionOrders(context, holdings)

    # -- before a program runs

    def outside(self, graph: GatherOrder, binding: Binding, split: frozenset[Unit], is_part: bool) -> frozenset[Unit]:
        """Units that `before_forward` will gather, whatever runs before it."""
        if not (is_part or self._every):
            return split
        return split.union(found.unit for found in self._wanted(graph, binding, split, frozenset()))

    def before_forward(
        self, graph: GatherOrder, binding: Binding, split: frozenset[Unit], is_part: bool, run: MakesRun
    ) -> None:
        """Gathers what a forward needs from outside, and launches gathers of the next regions.

        Args:
            graph: about to run.
            binding: its shards.
            split: units that are gathered as a whole.
            is_part: whether it is not all of what the user called.
            run: makes what there is to plan of `graph` with other regions.
        """
        if binding.units:
            self._brought.clear()
            stays, running = self._stays_behind_forward, self.orders.of_forward()
            self._before(running, "forward", graph, binding, split, is_part, run, stays)

    def before_backward(
        self,
        graph: GatherOrder,
        binding: Binding,
        split: frozenset[Unit],
        asked: BackwardRequest,
        run: MakesRun,
    ) -> None:
        """The same for a backward. `asked`: of it.

        Behind that of a whole call nothing is launched: a rank that follows it may not have its graph.
        """
        self._step = None
        gathers = self._holdings.gathers
        if graph.part or not binding.units:
            gathers.finish_used(binding.units)
            for unit, _ in binding.in_order(graph.part, graph.gather_order):
                if unit in split:
                    gathers.gather_whole(frozenset([unit]))
            return
        is_whole_call = asked.role is not None and asked.role.leg is None
        running = None if is_whole_call else self.orders.of_backward(asked.entry)
        self._step = running
        self._before(running, "backward", graph, binding, split, asked.is_part, run, _stays_behind_backward)

    def gather_in_backward(self, units: frozenset[Unit]) -> None:
        """Gathers units as a whole for code around graphs, in whose backward it comes before that of a region which
        uses them: for the order of regions, that has asked for them.
        """
        self._brought.update(unit for unit in units if any(map(is_missing, self._holdings.shards.of(unit))))
        self._holdings.gathers.gather_whole(units)

    def _stays_behind_forward(self, unit: Unit) -> bool:
        return self._holdings.residency.behind_forward(unit) == KEEP

    def _before(
        self,
        running: RunningPass[Wanted] | None,
        direction: str,
        graph: GatherOrder,
        binding: Binding,
        split: frozenset[Unit],
        is_part: bool,
        run: MakesRun,
        stays: Callable[[Unit], bool],
    ) -> None:
        gathers = self._holdings.gathers
        came = gathers.launched_ahead(binding.units)
        gathers.finish_used(binding.units)
        wanted = self._wanted(graph, binding, split, came)
        followed: Followed | None = None
        if running is not None:
            brought = [unit for unit in binding.units if unit in self._brought]
            self._brought.difference_update(brought)
            asked = [*wanted, *(Wanted(unit, self._holdings.shards.of(unit), True) for unit in brought)]
            names = tuple(unit.name for unit in self._holdings.shards.in_order(binding.unit_set))
            followed = self.orders.follow(running, PassStep(direction, names), asked, run)
        for found in () if followed is None else followed.gathers():
            gathers.launch_ahead((unit, shards, whole or stays(unit)) for unit, shards, whole in found)
        if followed is not None and followed.running.in_parts:
            wanted = followed.wanted()
        for unit, shards, whole in wanted:
            if whole or self._every or is_part:  # so that its first pass runs the programs of later ones
                gathers.gather(unit, shards, whole or stays(unit))
        gathers.finish_used(binding.units)
        for unit, shards, whole in self._ahead(followed, direction, binding):
            gathers.launch_ahead([(unit, shards, whole or stays(unit))])

    def _wanted(
        self, graph: GatherOrder, binding: Binding, split: frozenset[Unit], came: frozenset[Unit]
    ) -> list[Wanted]:
        """What can be gathered before the program, of what is not gathered now.

        That is split units, and all whole ones or the first one that the program would gather. `came`: were gathered
        ahead; without that, one of them were this first one.
        """
        wanted, leads = [], True
        for unit, own in binding.in_order(graph.part, graph.gather_order):
            shards: Sequence[Shard] = own
            # Programs are not told apart by what is frozen (see `state_text`): a backward gathers that itself.
            if graph.tangents and unit not in split and not any(shard.leaf.requires_grad for shard in own):
                leads = False
                continue
            if unit in split:
                if unit.world_size == 1:
                    continue
                shards = self._holdings.shards.of(unit)
            elif unit in binding.parts or not (self._every or leads) or not _is_plain(unit):
                continue
            if any(map(is_missing, shards)):
                wanted.append(Wanted(unit, shards, unit in split))
            elif unit not in came:
                continue
            leads = leads and unit in split
        return wanted

    def _ahead(self, followed: Followed | None, direction: str, binding: Binding) -> list[Wanted]:
        """What is gathered alone, ahead of the region that needs it."""
        chosen = [found for unit in binding.units for found in self._chosen(unit, direction, binding)]
        if followed is None or followed.order.plan is not None or (chosen and direction == "backward"):
            return chosen  # as in FSDP2, a choice replaces what would be prefetched in backward
        return [*chosen, *_of_next_region(followed)]

    # -- what users have chosen

    def _chosen(self, unit: Unit, direction: str, binding: Binding) -> list[Wanted]:
        """Units of other regions that the user chose to prefetch."""
        settings, shards = unit.settings(), self._holdings.shards
        names = settings.forward_prefetch if direction == "forward" else settings.backward_prefetch
        found = []
        for name in names:
            other = shards.unit_named(name)
            if other not in binding.unit_set and _is_plain(other):
                found.append(Wanted(other, shards.of(other), other in self._holdings.split.units))
        return found

    def say_ignored(self, binding: Binding) -> None:
        """Names the choices of users that cannot be followed."""
        for unit in binding.units:
            settings = unit.settings()
            others = map(self._holdings.shards.unit_named, (*settings.forward_prefetch, *settings.backward_prefetch))
            names = {other.name for other in others if other not in binding.unit_set and not _is_plain(other)}
            if names:
                self._report.say_once(
                    f"unit '{unit.name or 'root'}' prefetches {', '.join(sorted(names))}, gathered by another region"
                )

    # -- behind a backward

    def reduce_behind(self, units: Iterable[Unit]) -> None:
        """Launches the reductions of `units`, in the model's order, behind the backward that `before_backward` began,
        or puts them off until others are launched with them.
        """
        reductions = self._holdings.reductions
        followed = None if self._step is None else self.orders.followed(self._step)
        units = self._holdings.shards.in_order(frozenset(units))
        if self._step is not None:
            self._step.reductions[-1].update({unit.name: unit for unit in units})
        for unit in units:
            if followed is not None and followed.will_reduce(unit):
                reductions.put_off(unit)
            else:
                reductions.launch([unit])
        if followed is not None:
            for names, under_way in followed.reductions():
                reductions.wait(under_way)
                reductions.launch_put_off(names)

    def reduced_behind(
        self, graph: GatherOrder, binding: Binding, split: frozenset[Unit], asked: BackwardRequest
    ) -> frozenset[Unit]:
        """Units whose gradients are left to `UnitReductions.launch`, to be reduced while the next region runs."""
        if graph.part or asked.inputs_only or not graph.reduced:
            return frozenset()
        if self._every:
            units: Sequence[Unit] = binding.units
        elif (asked.is_part or self.orders.follows_backward) and graph.last_reduced is not None:
            units = [binding.shards[graph.last_reduced].unit]
        else:
            return frozenset()
        return frozenset(
            unit
            for unit in units
            if unit not in split and unit not in binding.parts and self._can_reduce_behind(unit, asked)
        )

    def _can_reduce_behind(self, unit: Unit, asked: BackwardRequest) -> bool:
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
                for shard in self._holdings.shards.of(unit)
            )
        )


def _stays_behind_backward(unit: Unit) -> bool:
    return not unit.reshard_after_backward


def _is_plain(unit: Unit) -> bool:
    """Whether a unit can be gathered outside programs: no shards over a smaller group, no all-gather of a user's."""
    return unit.world_size > 1 and unit.post_forward_mesh is None and not unit.settings().custom_all_gather


def _of_next_region(followed: Followed) -> list[Wanted]:
    """What the next region needs that has anything to gather."""
    for gathers in islice(followed.order.following(followed.position), HORIZON):
        if missing := [wanted for wanted in gathers if is_missing(wanted.shards[0])]:
            return missing
    return []
