"""Reads of single parameters outside any program, or for a graph that runs uncompiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphshard.capture.marked_classes import shard_key
from graphshard.compat.dynamo import uncaptured
from graphshard.compat.modules import own_parameters
from graphshard.compat.tensors import address
from graphshard.errors import UnsupportedModel
from graphshard.following.follower import Follower
from graphshard.fsdp2 import Unit
from graphshard.reporting.report import ProgramRecord, Report
from graphshard.runtime.read_memory import ReadMemory
from graphshard.state.calls import Call
from graphshard.state.holdings import Holdings
from graphshard.state.shard_table import class_of
from graphshard.state.shards import Shard
from graphshard.state.unit_programs import UnitPrograms


class OutsideReads:
    """Serves one parameter at a time, gathered once per forward.

    Args:
        programs: make and count the collectives.
        holdings: of the model.
        backward_runs: is called by each backward.
        follower: knows what other ranks do meanwhile.
        memory: of what is read.
        report: of the model.

    Attributes:
        served: parameters that a forward has read, so that a checkpoint may again.
        bring: gathers what is read, if this forward follows a contract; returns whether it does.
    """

    def __init__(
        self,
        programs: UnitPrograms,
        holdings: Holdings,
        backward_runs: Callable[[], None],
        follower: Follower,
        memory: ReadMemory,
        report: Report,
    ) -> None:
        self._programs = programs
        self._holdings = holdings
        self._backward_runs = backward_runs
        self._follower = follower
        self._memory = memory
        self._report = report
        self.served: set[Shard] = set()
        self._gathered: dict[tuple[int, bool], Tensor] = {}
        self._read_at: dict[Shard, int] = {}  # where its elements were when it was last read
        self.bring: Callable[[Shard], bool] = lambda shard: False

    def clear(self) -> None:
        """Frees what was gathered: the forward has ended."""
        self._gathered.clear()
        self._memory.forget()

    def end(self, units: Iterable[Unit], result: Any) -> None:
        """The forward of `units` has ended, and returned `result`: nothing reads those that are sharded again."""
        if not self._gathered:
            return
        for unit in units:
            for shard in self._holdings.shards.of(unit):
                if shard.full is None:
                    for enabled in (True, False):
                        self._gathered.pop((id(shard), enabled), None)
        self._memory.end_forward(units, result)

    def read(self, shard: Shard) -> Tensor:
        """One parameter, full size, in the middle of a forward that no graph covers."""
        again = self._gathered.get((id(shard), torch.is_grad_enabled()))
        if again is not None and shard.full is not None and self._follower.forward is None:
            return again
        self._touch(shard)
        self.served.add(shard)
        sends = shard.full is None
        if not self.bring(shard):
            self._holdings.gathers.gather_whole(self._holdings.split.in_forward(frozenset([shard.unit]), broken=True))
        self._report.say_once(
            f"{_owner(shard)} reads parameters outside any graph: they are gathered and reduced there"
        )
        return self._gather(shard, sends, None, None)

    def read_in_graph(self, leaf: Tensor, forward: ProgramRecord, backward: ProgramRecord) -> Tensor:
        """One parameter, full size, for a graph that runs uncompiled.

        Args:
            leaf: of the parameter.
            forward: counts its gathers.
            backward: counts its reductions.
        """
        shard = self._holdings.shards.at(leaf)
        self._touch(shard)
        return self._gather(shard, shard.full is None, forward, backward)

    def put_back(self, module: nn.Module, name: str, value: Tensor) -> None:
        """Has a parameter in its place again, where forward took it out and registers what it had read of it.

        Args:
            module: that owns it.
            name: of it, there.
            value: what is registered.

        Raises:
            UnsupportedModel: that is not what was read.
        """
        shard = self._holdings.shards.at(module.__dict__[shard_key(name)][0])
        if address(value.to_local() if isinstance(value, DTensor) else value) != self._read_at.get(shard):
            raise UnsupportedModel(
                f"{shard.fqn}: forward took it out of its module, and registers another value there; want what was "
                "taken out (remove_parametrizations(..., leave_parametrized=False)), or calls in "
                "graphshard.eager(model)"
            )
        own_parameters(module)[name] = shard.registered

    def _touch(self, shard: Shard) -> None:
        """What is gathered by hand must have arrived."""
        self._holdings.forward.touched.add(shard.unit)
        self._holdings.gathers.finish_used([shard.unit])

    def _gather(
        self, shard: Shard, sends: bool, forward: ProgramRecord | None, backward: ProgramRecord | None
    ) -> Tensor:
        key = (id(shard), torch.is_grad_enabled())
        if (full := self._gathered.get(key)) is None:
            if sends:  # one rank alone may look at what is there
                self._follower.reads_outside(shard)
            gathered: Tensor = _Read.apply(shard.leaf, shard, self, forward, backward)  # type: ignore[no-untyped-call]
            if (node := gathered.grad_fn) is not None:
                node.call = self._follower.outside_call(shard, node) or self._call(shard, node)  # type: ignore[attr-defined]
            full = gathered
            self._read_at[shard] = address(full)
            if self._holdings.forward.runs:  # when a checkpoint is recomputed in backward, nothing would free it
                self._gathered[key] = full
                if forward is None and self._may_be_emptied():
                    self._memory.hand_out(shard, full)
        return full

    def _call(self, shard: Shard, node: Any) -> Call | None:
        """Such a read as a call, where its gradient is added to what earlier backwards have left unreduced: its unit
        is not reduced before, as FSDP2 reduces both together.
        """
        if shard.held is None and shard.unit.reduce_grads:
            return None
        call = Call(self._holdings.shards.alone(shard), self._holdings.forward.entry, None, node, read=shard)
        self._holdings.calls.add(call)
        return call

    def _may_be_emptied(self) -> bool:
        """Whether what is read now is gathered again in backward, and not for a backward that runs."""
        in_backward = self._holdings.forward.in_backward
        return torch.is_grad_enabled() and not in_backward and self._follower.forward is None

    def run_forward(self, shard: Shard, record: ProgramRecord | None) -> Tensor:
        """Gathers, or takes what stays gathered."""
        full = shard.full
        if full is None:
            full = self._programs.launch_gather([shard], record).wait()[0]
        return shard.as_seen(full).data  # the same memory, but no view: a forward may write into it

    def run_backward(self, shard: Shard, grad: Tensor, call: Call | None, record: ProgramRecord | None) -> None:
        """Does with a gradient what the flags say now. `call`: the read, where its gradient
        is waited for: others are followed in it, or it is added to one that is held.
        """
        self._backward_runs()
        if call is not None and call.read is None:
            self._follower.outside_backward(call)
        elif call is not None:
            self._holdings.calls.reached(call)
        shard.hold(grad, shared=True)
        self._holdings.shards.active.add(shard.unit)
        self._memory.gradient_came(shard)
        if record is None:
            shard.report.eager_reductions[shard.fqn] += 1  # at the end of this backward, with the rest of its unit
        elif shard.unit.reduce_grads and not shard.unit.reduce_unused:
            self._programs.reduce([shard], record)


def _owner(shard: Shard) -> str:
    """Says which module owns a parameter, in the same words for equal blocks."""
    owner, unit = shard.fqn.rpartition(".")[0], shard.unit
    if not unit.name:
        return owner or "the root"
    return f"{class_of(unit)} {owner.removeprefix(unit.name).removeprefix('.')}".rstrip()


class _Read(torch.autograd.Function):
    """A gather whose backward follows the run-time flags like a program does."""

    @staticmethod
    def forward(
        ctx: Any,
        leaf: Tensor,
        shard: Shard,
        reads: OutsideReads,
        forward: ProgramRecord | None,
        backward: ProgramRecord | None,
    ) -> Tensor:
        ctx.state = (shard, reads, backward)
        if forward is None:
            shard.report.eager_unshards[shard.fqn] += 1
        return reads.run_forward(shard, forward)

    @staticmethod
    @uncaptured
    def backward(ctx: Any, *grads: Any) -> Any:
        shard, reads, record = ctx.state
        reads.run_backward(shard, grads[0], ctx.call, record)
        return None, None, None, None, None
