"""Calls of regions between forward and backward: what a backward must know of its own call and of the others."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphshard.compat.autograd import accumulates_into, compiled_function_node, keeps_graph, will_run
from graphshard.compat.dynamo import uncaptured
from graphshard.fsdp2 import Unit
from graphshard.state.binding import Binding
from graphshard.state.shards import Shard
from graphshard.state.signatures import Role


@dataclass(frozen=True)
class Entry:
    """What the user called, from outside any forward.

    Attributes:
        name: of these units, or of the called module's class.
        units: of the called module itself.
        partial: units of a list of modules of which the called one holds some, not all: they stay gathered, as FSDP2
            waits for the others, and their backward ends nothing but them.
    """

    name: str = ""
    units: frozenset[Unit] = frozenset()
    partial: frozenset[Unit] = frozenset()


class Call:
    """One call of a region, or one read around graphs, from its forward to its backward. The node of autograd's graph
    owns it.

    Attributes:
        binding: its shards.
        entry: what the user called.
        role: what it is to the other ranks; None: nothing, all ranks do the same by themselves.
        node: weakly, the node.
        is_part: whether the region is not all of what the user called.
        read: of a read that nothing follows: its shard.
    """

    def __init__(
        self,
        binding: Binding,
        entry: Entry,
        role: Role | None,
        node: Any,
        is_part: bool = False,
        read: Shard | None = None,
    ) -> None:
        self.binding = binding
        self.entry = entry
        self.role = role
        self.node = weakref.ref(node)
        self.is_part = is_part
        self.read = read

    @property
    def units(self) -> frozenset[Unit]:
        """Of the shards, and of those that ranks send for it."""
        return self.binding.unit_set | self.sent.unit_set

    @property
    def sent(self) -> Binding:
        """The shards that ranks send for it."""
        return self.role.whole.binding if self.role is not None and self.role.follows else self.binding

    def follows(self) -> bool:
        """Whether the running backward reaches this call, or this read, whose gradient is added to one that is held."""
        if self.read is not None and self.read.held is None:
            return False
        node = self.node()
        return node is not None and will_run(node)


class LiveCalls:
    """The calls of a model whose backward is still to come."""

    def __init__(self) -> None:
        self._calls: weakref.WeakSet[Call] = weakref.WeakSet()
        # Weak, since regions have them.
        self._of_unit: weakref.WeakKeyDictionary[Unit, weakref.WeakSet[Call]] = weakref.WeakKeyDictionary()
        self._kept: list[Call] = []

    def __iter__(self) -> Iterator[Call]:
        return iter(self._calls)

    def sharing(self, units: Iterable[Unit]) -> set[Call]:
        """Those that use one of the units, on this rank or on others."""
        return {call for unit in units if unit in self._of_unit for call in self._of_unit[unit]}

    def add(self, call: Call) -> None:
        """A forward has run."""
        self._calls.add(call)
        for unit in call.units:
            if (calls := self._of_unit.get(unit)) is None:
                calls = self._of_unit[unit] = weakref.WeakSet()
            calls.add(call)

    def reached(self, call: Call) -> None:
        """The running backward has come to `call`; behind it another may come, if the graph is kept."""
        self._calls.discard(call)
        for unit in call.units:
            if unit in self._of_unit:
                self._of_unit[unit].discard(call)
        if keeps_graph():
            self._kept.append(call)

    def end_backward(self) -> None:
        """The running backward ends."""
        while self._kept:
            self.add(self._kept.pop())

    def clear(self) -> None:
        """Forgets them."""
        self._calls.clear()
        self._of_unit.clear()
        self._kept.clear()


@dataclass(frozen=True)
class BackwardRequest:
    """What the running backward asks of one call.

    Attributes:
        entry: what the user called in forward.
        absent: whether each tangent has no gradient.
        again: shards that a later call of the same backward uses too.
        units_again: split units (see `SplitUnits`) of which that is so.
        inputs_only: whether no parameter is to get a gradient: `torch.autograd.grad`.
        role: of the call.
        forward: its shards.
        is_part: of the call.
    """

    entry: Entry = Entry()
    absent: tuple[bool, ...] = ()
    again: frozenset[Shard] = field(default_factory=frozenset)
    units_again: frozenset[Unit] = field(default_factory=frozenset)
    inputs_only: bool = False
    role: Role | None = None
    forward: Binding | None = None
    is_part: bool = False


class Calls:
    """The calls of one region.

    Args:
        live: all of the model.
        split: the model's split units.
        region: number of the region.
    """

    def __init__(self, live: LiveCalls, split: weakref.WeakSet[Unit], region: int) -> None:
        self._live = live
        self._split = split
        self._region = region
        self._local = threading.local()  # autograd runs a device's backward in a thread of its own

    def begin(self, binding: Binding, entry: Entry, role: Role | None = None, is_part: bool = False) -> None:
        """Is told of the forward that runs now (see `Call`)."""
        self._local.begun = binding, entry, role, is_part

    def watch(self, results: Sequence[Any]) -> None:
        """Watches the autograd node behind a call's results."""
        outputs = [t for t in results if isinstance(t, Tensor) and t.requires_grad and t.grad_fn is not None]
        node, numbers = compiled_function_node(outputs)
        begun = self._local.__dict__.pop("begun", None)
        if node is not None:
            binding, entry, role, is_part = begun or (Binding(()), Entry(), None, False)
            call = Call(binding, entry, role, node, is_part)
            self._live.add(call)
            node.register_prehook(partial(self._before_backward, numbers, call))

    @uncaptured  # backward may run in a forward that Dynamo watches: forces are gradients
    def _before_backward(self, numbers: Sequence[int], call: Call, grads: Sequence[Tensor | None]) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"backward: got create_graph=True for compiled region {self._region}: gradients of gradients are "
                "computed in one graph with what they are of alone; want torch.autograd.grad in forward, behind no "
                "graph break and without regions='unit', or calls in graphshard.eager(model). For several backwards "
                "want retain_graph=True"
            )
        self._live.reached(call)
        binding, again = call.binding, frozenset[Shard]()
        split, units_again = frozenset(filter(self._split.__contains__, binding.parts)), frozenset[Unit]()
        for other in self._live.sharing(binding.units):
            shared, units = binding.overlap(other.sent), split & other.binding.unit_set
            if not (shared <= again and units <= units_again) and other.follows():
                again, units_again = again | shared, units_again | units
        leaf = next((shard.leaf for shard in binding.shards if shard.leaf.requires_grad), None)
        inputs_only = leaf is not None and not accumulates_into(leaf)
        self._local.backward = BackwardRequest(
            call.entry,
            tuple(grads[i] is None for i in numbers),
            again,
            units_again,
            inputs_only,
            call.role,
            binding,
            call.is_part,
        )

    def backward(self) -> BackwardRequest:
        """What the backward that runs now asks, as its node has seen just before."""
        found: BackwardRequest | None = self._local.__dict__.pop("backward", None)
        return found or BackwardRequest()
