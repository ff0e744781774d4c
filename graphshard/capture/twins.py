"""Which blocks of a model are alike, so that Dynamo need not trace the code of each: see `graph.twin_calls`.

Blocks that are alike bear marks ``group.respects:number``, which their calls read while they are traced
(`marked_classes`). Dynamo guards marks, and what the exemplar's code reads. So a trace is right for twins as long as
they are like their exemplar, in the same respects, which is looked at before each call: where that changes, marks do,
and the model is traced again.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from torch import Tensor, nn

from graphshard.capture.alike import BlockState, Place, indices
from graphshard.capture.twin_asking import TWIN_MARK

T = TypeVar("T")
MOST_CHANGES = 3  # of what blocks have in common, each of which has them traced again
LEAST_TWINS = 3  # of blocks of one class: of fewer all are traced


def candidates(unit_modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Modules of units that may be alike: those of one class, none of which is in another.

    Args:
        unit_modules: outer ones before those inside.
    """
    found: list[nn.Module] = []
    inside: set[int] = set()
    kinds: dict[type, list[nn.Module]] = {}
    for module in unit_modules:
        kinds.setdefault(type(module), []).append(module)
    for modules in kinds.values():
        same = set(map(id, modules))
        apart = [module for module in modules if (ids := _ids(module)).isdisjoint(inside) and len(ids & same) == 1]
        if len(apart) >= LEAST_TWINS:
            found += apart
            inside = inside.union(*map(_ids, apart))
    return found


def _ids(module: nn.Module) -> set[int]:
    return set(map(id, module.modules()))


class Twins:
    """The blocks of one model that may be alike.

    Args:
        model: the model.
        blocks: `candidates`.
        say: tells why no blocks are alike.

    Attributes:
        blocks: none where nobody asked for twins.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], say: Callable[[str], None]) -> None:
        self._say = say
        self._model = model
        self.blocks = blocks
        self._states: list[BlockState] = []
        self._read: set[str] = set()  # attributes that blocks read, though each has another value
        self._left_out: set[str] = set()
        self._refused = False
        self._changes = 0
        self._respects: dict[object, int] = {}
        self._kept: list[object] = []
        for block in blocks:
            vars(block)[TWIN_MARK] = ""

    def refresh(self, hooks_changed: bool) -> None:
        """Looks whether blocks have changed, and marks those that are alike."""
        if self._refused or not self.blocks:
            return
        try:
            self._look(hooks_changed)
        except Exception as error:  # a call does not end because of what could have been faster
            self.refuse(f"what they hold cannot be looked at ({type(error).__name__}: {error})")

    def _look(self, hooks_changed: bool) -> None:
        if hooks_changed or not self._states:
            self._states = [BlockState(block) for block in self.blocks]
        elif all(state.is_current() for state in self._states):
            return
        else:
            self._states = [
                state if state.is_current() and not state.holds_tensors else BlockState(block)
                for block, state in zip(self.blocks, self._states, strict=True)
            ]
        before = self._marks()
        self._mark()
        if any(before) and before != self._marks():
            self._changes += 1
            if self._changes > MOST_CHANGES:
                self.refuse("they change too often")

    def _marks(self) -> list[str]:
        return [vars(block)[TWIN_MARK] for block in self.blocks]

    def _mark(self) -> None:
        states, shared = self._states, _shared([state.places for state in self._states])
        self._left_out = set()
        opaque = {at for at, state in enumerate(states) if state.holds_tensors}
        for at in opaque:
            vars(self.blocks[at])[TWIN_MARK] = ""
        seen = {at: (state.structure, shared[at]) for at, state in enumerate(states) if at not in opaque}
        for members in _equal(seen):
            names = [name for name, _ in states[members[0]].scalars]
            out = {at for at in indices(states[at] for at in members) if names[at] not in self._read}
            self._left_out |= {names[at] for at in out}
            # In which respects they are alike: a trace is right for these only.
            places = tuple(place.name for place in states[members[0]].places)
            respects = (tuple(sorted(out)), tuple(sorted(names[at] for at in out)), shared[members[0]], places)
            number = self._respects.setdefault(respects, len(self._respects))
            for group in _equal({at: states[at].common(out) for at in members}):
                for member in group:
                    mark = f"{group[0]}.{number}:{member}" if len(group) > 1 else ""
                    vars(self.blocks[member])[TWIN_MARK] = mark

    def tensors(self, mark: str) -> list[Tensor]:
        """Leaves of parameters and buffers of a marked block now, in the same order for all that are alike."""
        return [place.tensor() for place in self._places(mark)]

    def held_alone(self, mark: str, exemplar: str) -> set[int]:
        """Ids of what a block holds, tensors too, and its exemplar does not."""
        mine, theirs = ({*self._state(block).objects, *map(id, self.tensors(block))} for block in (mark, exemplar))
        return mine - theirs

    def tensors_at(self, places: Iterable[tuple[str, int]]) -> list[Tensor]:
        """Some of them: (mark, position)."""
        return [self._places(mark)[at].tensor() for mark, at in places]

    def _places(self, mark: str) -> Sequence[Place]:
        return self._state(mark).places

    def _state(self, mark: str) -> BlockState:
        return self._states[int(mark.partition(":")[2])]

    def names(self) -> dict[int, set[str]]:
        """The names that blocks, and modules in them, have where they are, by their ids."""
        names: dict[int, set[str]] = {id(module): set() for block in self.blocks for module in block.modules()}
        for parent in self._model.modules():
            for name, child in vars(parent)["_modules"].items():
                if id(child) in names:
                    names[id(child)].add(name)
        return names

    def learn_read(self, expressions: Iterable[str]) -> bool:
        """Whether a trace has read what blocks do not have in common. Then they are not alike any more.

        Args:
            expressions: that the trace depends on.
        """
        text = "\n".join(expressions) if self._left_out else ""
        read = {name for name in self._left_out if re.search(rf"\b{re.escape(name)}\b", text)}
        self._read |= read
        if read:
            self._mark()
        return bool(read)

    def refuse(self, why: str) -> None:
        """From now on no blocks are alike."""
        self._refused = True
        self._say(f"blocks are captured one by one: {why}")
        for block in self.blocks:
            vars(block)[TWIN_MARK] = ""

    def kept(self, value: T) -> weakref.ref[T]:
        """Keeps `value` as long as the model; whoever reads it by the reference does not."""
        self._kept.append(value)
        return weakref.ref(value)


def _equal(keys: Mapping[int, object]) -> list[list[int]]:
    """Those with equal keys together."""
    groups: dict[object, list[int]] = {}
    for member, key in keys.items():
        groups.setdefault(key, []).append(member)
    return list(groups.values())


def _shared(places: Sequence[Sequence[Place]]) -> list[object]:
    """For each block, which of its tensors other blocks have too, and where."""
    found: dict[int, list[tuple[int, int]]] = {}
    for block, own in enumerate(places):
        for at, place in enumerate(own):
            found.setdefault(id(place.tensor()), []).append((block, at))
    shared: list[list[object]] = [[] for _ in places]
    for holders in found.values():
        if len(blocks := {block for block, _ in holders}) > 1:
            for block in blocks:
                shared[block].append(tuple(holders))
    return [tuple(own) for own in shared]
