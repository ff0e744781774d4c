"""The order in which regions run, recorded in one pass, compared with that of the other ranks, then followed.

What is launched ahead is a function of the calls so far, so it is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from graphshard.compat.autograd import backward_id, call_at_end_of_backward
from graphshard.compat.dynamo import uncaptured
from graphshard.fsdp2 import Unit
from graphshard.planning.pass_plan import PassPlan, plan_pass
from graphshard.runtime.orders import MakesRun, Order, Orders, PassStep, RunningPass
from graphshard.state.calls import Entry
from graphshard.state.holdings import Holdings
from graphshard.state.model_context import ModelContext
from graphshard.state.shards import Shard
from graphshard.state.unit_state import KEEP

_SUBJECT = "the order of their regions"
_ADVICE = "want the same calls on every rank, so look for a branch or a graph break that depends on the rank"
# Ranks come to an order at the same time, or one of them never does: it is asked for so often.
ASKED_TIMES = 2
# In the place of a plan; why there is none follows.
_UNPLANNED = "-"


class Wanted(NamedTuple):
    """What a step gathers of one unit; `whole`: the unit is gathered as a whole, for several regions."""

    unit: Unit
    shards: Sequence[Shard]
    whole: bool


def is_missing(shard: Shard) -> bool:
    """Whether a parameter is not gathered, not even over a smaller group."""
    return shard.full is None and shard.post_forward is None


@dataclass(frozen=True)
class Followed:
    """A step of a pass that follows a known order.

    Attributes:
        order: that is followed.
        running: the pass.
    """

    order: Order[Wanted]
    running: RunningPass[Wanted]

    @property
    def position(self) -> int:
        """Of the step."""
        return len(self.running.steps) - 1

    def gathers(self) -> Iterator[list[Wanted]]:
        """What the plan has gathered together, up to here; each once."""
        planned = () if self.order.plan is None else self.order.plan.gathers
        launched = self.running.launched
        while launched.gathers < len(planned) and planned[launched.gathers].launch <= self.position:
            units = planned[launched.gathers].units
            launched.gathers += 1
            found = [self.order.gathers[place].get(name) for name, place in units if place >= self.position]
            yield [wanted for wanted in found if wanted is not None and any(map(is_missing, wanted.shards))]

    def wanted(self) -> list[Wanted]:
        """What the step gathers in the known order, of what is not gathered now."""
        known = self.order.gathers[self.position].values()
        return [wanted for wanted in known if any(map(is_missing, wanted.shards))]

    def will_reduce(self, unit: Unit) -> bool:
        """Whether the plan has the unit reduced together with others."""
        planned = () if self.order.plan is None else self.order.plan.reductions
        return any(unit.name in group.units for group in planned[self.running.launched.reductions :])

    def reductions(self) -> Iterator[tuple[tuple[str, ...], int]]:
        """What the plan has reduced together, up to behind this step, each once; and how many may be under way."""
        planned = () if self.order.plan is None else self.order.plan.reductions
        launched = self.running.launched
        while launched.reductions < len(planned) and planned[launched.reductions].launch <= self.position + 1:
            group = planned[launched.reductions]
            under_way = sum(before.wait > group.launch for before in planned[: launched.reductions])
            launched.reductions += 1
            yield group.units, under_way


class RegionOrders:
    """The passes of one model.

    Args:
        context: of the model.
        holdings: of the model.

    Attributes:
        follows_backward: whether the running backward follows a known order of several steps.
    """

    def __init__(self, context: ModelContext, holdings: Holdings) -> None:
        self._context = context
        self._holdings = holdings
        self._orders: Orders[Wanted] = Orders()
        self._forward: RunningPass[Wanted] | None = None
        self._backward: RunningPass[Wanted] | None = None
        self._backward_id = -1
        self._told: set[str] = set()  # kinds of passes: a model of varying depth would have a line for each depth
        self.follows_backward = False

    # -- passes

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the outermost forward; its regions are recorded if it ends well."""
        if self._holdings.forward.in_backward:  # a checkpoint is recomputed: a part of that backward
            yield
            return
        if self._backward_id != -1:  # a backward that failed
            self._backward, self._backward_id = None, -1
            self._holdings.reductions.finish()
        self._holdings.gathers.drop_ahead()
        mode = "with" if torch.is_grad_enabled() else "without"
        self._forward = self._orders.begin(f"forward of '{self._holdings.forward.entry.name}' {mode} gradients")
        try:
            yield
            self._orders.end(self._forward)
        finally:
            self._forward = None
            self._holdings.gathers.drop_ahead()

    def of_forward(self) -> RunningPass[Wanted] | None:
        """The pass that a forward program is a step of; None: it is not recorded."""
        forward = self._holdings.forward
        return self.of_backward(forward.entry) if forward.in_backward else self._forward

    def of_backward(self, entry: Entry) -> RunningPass[Wanted] | None:
        """The same of a backward program. `entry`: what the user called in forward."""
        if (number := backward_id()) != self._backward_id:
            # One backward inside another, as of reentrant checkpoints: neither is followed.
            inside = self._backward_id != -1
            self._backward = None if inside else self._orders.begin(f"backward of '{entry.name}'")
            self._backward_id, self.follows_backward = number, False
            call_at_end_of_backward(self._end_backward)
        return self._backward

    @uncaptured
    def _end_backward(self) -> None:
        if self._backward is not None:
            self._orders.end(self._backward)
        self._backward, self._backward_id, self.follows_backward = None, -1, False
        self._holdings.gathers.drop_ahead()

    # -- steps

    def follow(
        self,
        running: RunningPass[Wanted],
        step: PassStep,
        wanted: Sequence[Wanted],
        run: MakesRun,
    ) -> Followed | None:
        """Takes a step; None: the pass follows no known order.

        Args:
            running: the pass.
            step: that runs now.
            wanted: what it has to gather.
            run: makes what there is to plan of it.

        Raises:
            RanksDiffer: the other ranks have another order.
        """
        gathers = {found.unit.name: found for found in wanted}
        if running.goes_on(step, gathers, run):
            return self.followed(running)
        order = running.follow(step, gathers, run)
        if order is not None:
            self._agree(order, running)
            if order.agreed and len(running.steps) == 1 and order.planned < order.to_plan():
                order.plan, order.planned = self._plan(order), order.to_plan()
        elif running.expected is not None:
            if running.kind not in self._told:
                self._context.report.note_once(
                    f"{running.kind}: ran {step} where {running.expected} was known to follow: nothing is gathered "
                    "ahead behind it"
                )
                self._told.add(running.kind)
            running.expected = None
        if running is self._backward:
            self.follows_backward = order is not None and order.agreed
        return self.followed(running)

    def followed(self, running: RunningPass[Wanted]) -> Followed | None:
        """The latest step of a pass, where it follows an order that all ranks have."""
        return Followed(running.known[0], running) if running.known and running.known[0].agreed else None

    def _agree(self, order: Order[Wanted], running: RunningPass[Wanted]) -> None:
        """Finds out whether all ranks have the order that a pass may follow, where there is anything to launch ahead in
        it. A rank that has come apart has one of its own, and nobody else comes for that.
        """
        if order.agreed or order.asked == ASKED_TIMES or len(order.steps) < 2 or not _units(order):
            return
        consensus, what = self._context.consensus, f"{self._context.name}: {order.kind}"
        lines = [order.kind, *map(str, order.steps)]
        key = f"order of the {order.kind}, pass {running.number}, step {len(running.steps)}"
        if (met := consensus.meet(key, what, "\n".join(lines), consensus.patience_s)) is None:
            order.asked += 1
            if order.asked == ASKED_TIMES:
                self._context.report.note_once(
                    f"{order.kind}: not all ranks came to an order of regions: nothing is gathered ahead in it"
                )
        elif met.alike:
            order.agreed = True
        else:
            consensus.compare(f"{key} differs", what, lines, _SUBJECT, _ADVICE)

    def _plan(self, order: Order[Wanted]) -> PassPlan | None:
        """What all ranks gather and reduce together in an order; None: they do as FSDP2."""
        planning = self._context.planning
        if planning is None or planning.mode != "auto":
            return None
        budget_bytes = planning.budget_bytes

        def decide() -> str:
            settings = [unit.settings() for unit in _units(order)]
            runs = [made for run in order.runs if (made := run()) is not None]
            if any(own.forward_prefetch or own.backward_prefetch for own in settings):
                return f"{_UNPLANNED}users have chosen what is prefetched"
            gathers = [self._gathers(order, place) for place in range(len(order.steps))]
            plan = plan_pass(runs, gathers, [frozenset(reduced) for reduced in order.reductions], budget_bytes)
            return f"{_UNPLANNED}nothing else fits memory_budget" if plan is None else plan.text()

        what = f"what is gathered and reduced between regions in the {order.kind}"
        leader = min(rank for unit in _units(order) for rank in unit.ranks)
        sent = (f"{step}: {gathers}, {reduced}" for step, gathers, reduced in order.in_steps())
        key = "\n".join((f"{what}, by {leader}", *sent))
        text, note = self._context.consensus.settle(key, what, decide, leader), self._context.report.note_once
        if text.startswith(_UNPLANNED):
            why = text.removeprefix(_UNPLANNED)
            note(f"{order.kind}: between regions, units are gathered one ahead, and each alone: {why}")
            return None
        plan = PassPlan.parse(text)
        note(f"{order.kind}: {plan}")
        return plan

    def _gathers(self, order: Order[Wanted], place: int) -> dict[str, tuple[tuple[str, ...], int | None]]:
        """What a step gathers: by unit, FQNs, and the last step that uses them; None: they stay."""
        found = {}
        for name, (unit, shards, _) in order.gathers[place].items():
            later = range(place + 1, len(order.steps))
            again = next((at for at in later if name in order.gathers[at]), len(order.steps))
            last = max((at for at in range(place, again) if name in order.steps[at].units), default=place)
            found[name] = (tuple(shard.fqn for shard in shards), None if self._stays(order, unit) else last)
        return found

    def _stays(self, order: Order[Wanted], unit: Unit) -> bool:
        if order.steps[-1].direction == "backward":
            return not unit.reshard_after_backward
        return self._holdings.residency.behind_forward(unit) == KEEP


def _units(order: Order[Wanted]) -> list[Unit]:
    """All that are gathered or reduced."""
    gathered = [found.unit for gathers in order.gathers for found in gathers.values()]
    return list(dict.fromkeys([*gathered, *(unit for reduced in order.reductions for unit in reduced.values())]))
