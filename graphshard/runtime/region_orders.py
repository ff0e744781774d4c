"""The order in which regions run, recorded in one pass, compared with that of the other ranks, then followed.

What is launched ahead is a function of the calls so far, so it is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from graphshard.agree.agreement import Posted, post_to_group
from graphshard.compat.autograd import backward_id, call_at_end_of_backward
from graphshard.fsdp2 import Unit
from graphshard.planner import Problem, choose_depth
from graphshard.runtime.orders import Order, Orders, PassStep, RunningPass
from graphshard.state.calls import Entry
from graphshard.state.holdings import Holdings
from graphshard.state.model_context import ModelContext
from graphshard.state.shards import Shard


class Wanted(NamedTuple):
    """What a step gathers of one unit; `whole`: the unit is gathered as a whole, for several regions."""

    unit: Unit
    shards: Sequence[Shard]
    whole: bool


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
        self._posted: dict[int, list[Posted]] = {}  # by identity of an order
        self._problems: dict[PassStep, Callable[[], Problem | None]] = {}
        self._forward: RunningPass[Wanted] | None = None
        self._backward: RunningPass[Wanted] | None = None
        self._backward_id = -1
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
            self._end(self._forward)
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

    def _end_backward(self) -> None:
        if self._backward is not None:
            self._end(self._backward)
        self._backward, self._backward_id, self.follows_backward = None, -1, False
        self._holdings.gathers.drop_ahead()

    def _end(self, running: RunningPass[Wanted]) -> None:
        order = self._orders.end(running)
        if order is None or id(order) in self._posted or len(order.steps) < 2 or not any(order.gathers):
            return  # nothing to launch ahead: ranks may differ
        groups: dict[str, set[str]] = {}
        for gathers in order.gathers:
            for name, (unit, *_) in gathers.items():
                for group in filter(None, (unit.group_name, unit.replicate_group_name)):
                    groups.setdefault(group, set()).add(name)
        what = f"{self._context.name}: {running.kind}"
        posts = (post_to_group(group, what, _lines(order, names)) for group, names in sorted(groups.items()))
        self._posted[id(order)] = [posted for posted in posts if posted is not None]

    # -- steps

    def follow(
        self,
        running: RunningPass[Wanted],
        step: PassStep,
        wanted: Sequence[Wanted],
        problem: Callable[[], Problem | None],
    ) -> tuple[Order[Wanted], int] | None:
        """Takes a step; returns the known order that the pass follows and the place of the step in it.

        Args:
            running: the pass.
            step: that runs now.
            wanted: what it has to gather.
            problem: of its program, to plan with those of other regions.

        Raises:
            RanksDiffer: the other ranks have another order.
        """
        self._problems.setdefault(step, problem)
        order = running.follow(step, {found.unit.name: found for found in wanted})
        if order is not None:
            self._agree(order)
        elif running.expected is not None:
            self._context.report.note_once(
                f"{running.kind}: ran {step} where {running.expected} was known to follow: nothing is gathered "
                "ahead behind it"
            )
            running.expected = None
        if running is self._backward:
            self.follows_backward = order is not None and len(order.steps) > 1
        return None if order is None else (order, len(running.steps) - 1)

    def _agree(self, order: Order[Wanted]) -> None:
        if not order.agreed and (posts := self._posted.get(id(order))) is not None:
            for posted in posts:
                posted.compare()
            order.agreed, order.depth = True, self._depth(order)

    def _depth(self, order: Order[Wanted]) -> int:
        """As planned within `memory_budget`; without one there is only room for FSDP2's one."""
        planning = self._context.planning
        if planning is None or planning.mode != "auto" or planning.budget_bytes is None:
            return order.depth
        budget_bytes = planning.budget_bytes

        def decide() -> str:
            problems = [problem for step in order.steps if (problem := self._problems[step]()) is not None]
            return str(choose_depth(problems, budget_bytes).depth if problems else order.depth)

        what = f"how far ahead regions of the {order.kind} are gathered"
        depth = int(self._context.consensus.settle("\n".join((what, *map(str, order.steps))), what, decide))
        if depth > 1:
            note = f"{order.kind}: gathers are launched {depth} regions ahead, within memory_budget"
            self._context.report.note_once(note)
        return depth


def _lines(order: Order[Wanted], names: set[str]) -> list[str]:
    """The steps that use the units `names`, as far as they do."""
    lines = [order.kind]
    for step in order.steps:
        if own := tuple(name for name in step.units if name in names):
            lines.append(str(PassStep(step.direction, own)))
    return lines
