"""The orders in which regions run, as earlier passes over a model have shown them: what follows is known from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

P = TypeVar("P")

# How many orders are kept of one kind of pass: a model that runs other modules in each step has ever new ones.
MAX_ORDERS = 8


@dataclass(frozen=True)
class Step:
    """One region in a pass, the same on every rank.

    Attributes:
        direction: ``"forward"`` or ``"backward"``.
        units: names of the units that it uses, in the model's order.
        gathers: names of those of which a gather may be launched before it.
    """

    direction: str
    units: tuple[str, ...]
    gathers: tuple[str, ...]

    def __str__(self) -> str:
        """What errors say of it."""
        units = ", ".join(name or "root" for name in self.units)
        gathers = ", ".join(name or "root" for name in self.gathers)
        return f"{self.direction} of {units}" + (f", gathering {gathers}" if gathers else "")


@dataclass
class Order(Generic[P]):
    """A whole pass.

    Attributes:
        kind: of pass.
        steps: in order.
        gathers: for each step, what it gathers.
        agreed: whether all ranks are known to have it.
    """

    kind: str
    steps: tuple[Step, ...]
    gathers: tuple[P, ...]
    agreed: bool = False

    def following(self, position: int, count: int) -> list[P]:
        """What the next `count` steps behind `position` gather, of those that gather anything."""
        found: list[P] = []
        for step, gathers in zip(self.steps[position + 1 :], self.gathers[position + 1 :], strict=True):
            if len(found) == count:
                break
            if step.gathers:
                found.append(gathers)
        return found


@dataclass
class Walk(Generic[P]):
    """A pass under way.

    Attributes:
        kind: of pass.
        known: orders that begin as this one did so far, the latest first.
        steps, gathers: so far.
        expected: what the last known order had in the place where this pass left it, None where it did not.
    """

    kind: str
    known: list[Order[P]]
    steps: list[Step] = field(default_factory=list)
    gathers: list[P] = field(default_factory=list)
    expected: Step | None = None

    def follow(self, step: Step, gathers: P) -> Order[P] | None:
        """Takes one step; returns the order that is followed, None where there is none."""
        position = len(self.steps)
        self.steps.append(step)
        self.gathers.append(gathers)
        if not self.known:
            return None
        last = self.known[0]
        self.known = [order for order in self.known if order.steps[position : position + 1] == (step,)]
        if self.known:
            return self.known[0]
        self.expected = last.steps[position] if position < len(last.steps) else None
        return None

    @property
    def has_left(self) -> bool:
        """Whether this pass has just left the last order that it followed."""
        return self.expected is not None


class Orders(Generic[P]):
    """The orders of one model."""

    def __init__(self) -> None:
        self._known: dict[str, list[Order[P]]] = {}

    def begin(self, kind: str) -> Walk[P]:
        """A pass of a kind begins."""
        return Walk(kind, list(self._known.get(kind, ())))

    def end(self, walk: Walk[P]) -> Order[P] | None:
        """A pass has ended; returns its order if it is a new one."""
        if not walk.steps:
            return None
        known = self._known.setdefault(walk.kind, [])
        steps = tuple(walk.steps)
        for order in known:
            if order.steps == steps:
                known.remove(order)
                known.insert(0, order)
                order.gathers = tuple(walk.gathers)
                return None
        if len(known) == MAX_ORDERS:
            return None
        order = Order(walk.kind, steps, tuple(walk.gathers))
        known.insert(0, order)
        return order
