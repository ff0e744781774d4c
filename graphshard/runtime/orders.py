"""The orders in which regions run, as earlier passes over a model have shown them: what follows is known from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from graphshard.fsdp2 import Unit
from graphshard.planner import RegionRun
from graphshard.planning.pass_plan import PassPlan

G = TypeVar("G")
MakesRun = Callable[[], RegionRun | None]

# How many orders are kept of one kind of pass: a model that runs other modules in each step has ever new ones.
MAX_ORDERS = 8


@dataclass(frozen=True)
class PassStep:
    """One region in a pass, the same on every rank.

    Attributes:
        direction: ``"forward"`` or ``"backward"``.
        units: names of the units that it uses, in the model's order.
    """

    direction: str
    units: tuple[str, ...]

    def __str__(self) -> str:
        """What errors say of it."""
        return f"{self.direction} of {', '.join(name or 'root' for name in self.units)}"


@dataclass
class Order(Generic[G]):
    """A whole pass.

    Attributes:
        kind: of pass.
        steps: in order.
        gathers: for each step, what it had to gather in some pass, by the name of the unit.
        reductions: likewise, the units whose gradients were reduced behind it.
        runs: for each step, makes what there is to plan of it.
        agreed: whether all ranks are known to have it.
        asked: how often that was asked, and not all came.
        plan: what is gathered and reduced together, and when; None: as in FSDP2.
        planned: how much there was to plan.
    """

    kind: str
    steps: tuple[PassStep, ...]
    gathers: tuple[dict[str, G], ...]
    reductions: tuple[dict[str, Unit], ...]
    runs: tuple[MakesRun, ...]
    agreed: bool = False
    asked: int = 0
    plan: PassPlan | None = None
    planned: int = 0

    def to_plan(self) -> int:
        """How many gathers and reductions there are; more, where a later pass needs others (the first of those that
        accumulate reduces nothing).
        """
        return sum(map(len, self.gathers)) + sum(map(len, self.reductions))

    def in_steps(self) -> Iterator[tuple[PassStep, list[str], list[str]]]:
        """Each step, with the names of the units that it gathers, and of those that are reduced behind it."""
        for step, gathers, reduced in zip(self.steps, self.gathers, self.reductions, strict=True):
            yield step, sorted(gathers), sorted(reduced)

    def following(self, position: int) -> Iterator[list[G]]:
        """What the steps behind `position` gather, of those that gather anything."""
        for place in range(position + 1, len(self.steps)):
            if self.gathers[place]:
                yield list(self.gathers[place].values())


@dataclass
class Launched:
    """How many of the gathers and of the reductions of a plan."""

    gathers: int = 0
    reductions: int = 0


@dataclass
class RunningPass(Generic[G]):
    """A pass under way.

    Attributes:
        kind: of pass.
        number: of the passes of its kind, the same on every rank.
        known: orders that begin as this one did so far, the latest first.
        steps, gathers, reductions, runs: so far.
        launched: what of the plan.
        expected: what the last known order had in the place where this pass left it, None where it did not.
        in_parts: whether the latest step is one of a known order of which this rank has parts: a checkpoint that
            recomputes what it has in other graphs, or what is part of a backward's graph on other ranks.
    """

    kind: str
    number: int
    known: list[Order[G]]
    steps: list[PassStep] = field(default_factory=list)
    gathers: list[dict[str, G]] = field(default_factory=list)
    reductions: list[dict[str, Unit]] = field(default_factory=list)
    runs: list[MakesRun] = field(default_factory=list)
    launched: Launched = field(default_factory=Launched)
    expected: PassStep | None = None
    in_parts: bool = False

    def follow(self, step: PassStep, gathers: Mapping[str, G], run: MakesRun) -> Order[G] | None:
        """Takes one step; returns the order that is followed, None where there is none."""
        position = len(self.steps)
        known = self._known_at(position)
        begun = None if step in known else next((found for found in known if self._is_part(step, found)), None)
        self.in_parts, step = begun is not None, begun or step
        self.steps.append(step)
        self.gathers.append({} if self.in_parts else dict(gathers))  # a part's are not those of the step
        self.reductions.append({})
        self.runs.append(run)
        if not self.known:
            return None
        last = self.known[0]
        self.known = [order for order in self.known if order.steps[position : position + 1] == (step,)]
        if self.known:
            if self.known[0] is not last:
                self.launched = Launched()
            return self.known[0]
        self.expected = last.steps[position] if position < len(last.steps) else None
        return None

    def goes_on(self, step: PassStep, gathers: Mapping[str, G], run: MakesRun) -> bool:
        """Whether a step is one more part of the latest one; if so, takes it."""
        latest = self.steps[-1] if self.known and self.steps else None
        if latest is None or not (self.in_parts or latest.direction == "forward"):
            return False
        ends = step == latest and step.direction == "backward"
        if not ends and (not self._is_part(step, latest) or step in self._known_at(len(self.steps))):
            return False
        if ends:
            self.runs[-1] = run
            self.gathers[-1].update(gathers)
        self.in_parts = not ends
        return True

    def _known_at(self, position: int) -> list[PassStep]:
        return [order.steps[position] for order in self.known if position < len(order.steps)]

    def _is_part(self, step: PassStep, whole: PassStep) -> bool:
        """Whether a step can be a part of another one: what a checkpoint recomputes."""
        is_recomputed = step.direction == "forward" and self.known[0].steps[-1].direction == "backward"
        return is_recomputed and set(step.units) <= set(whole.units)


class Orders(Generic[G]):
    """The orders of one model."""

    def __init__(self) -> None:
        self._known: dict[str, list[Order[G]]] = {}
        self._passes: Counter[str] = Counter()

    def begin(self, kind: str) -> RunningPass[G]:
        """A pass of a kind begins."""
        self._passes[kind] += 1
        return RunningPass(kind, self._passes[kind], list(self._known.get(kind, ())))

    def end(self, running: RunningPass[G]) -> Order[G] | None:
        """A pass has ended; returns its order, known before or new, or None: no more are kept."""
        if not running.steps:
            return None
        known = self._known.setdefault(running.kind, [])
        steps = tuple(running.steps)
        for order in known:
            if order.steps == steps:
                known.remove(order)
                known.insert(0, order)
                for gathers, latest in zip(order.gathers, running.gathers, strict=True):
                    gathers.update(latest)
                for reductions, reduced in zip(order.reductions, running.reductions, strict=True):
                    reductions.update(reduced)
                return order
        if len(known) == MAX_ORDERS:
            return None
        order = Order(running.kind, steps, tuple(running.gathers), tuple(running.reductions), tuple(running.runs))
        known.insert(0, order)
        return order
