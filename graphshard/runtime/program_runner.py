"""Runs the programs of one region: what shards hold goes in, what is to stay with them is taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from graphshard.faults import run_program
from graphshard.runtime.region_lowering import RegionLowering
from graphshard.state.binding import Binding
from graphshard.state.calling_convention import CallingConvention
from graphshard.state.holdings import Holdings
from graphshard.state.marked_graph import BoxedCallable, MarkedGraph, Program
from graphshard.state.shards import Shard


class ProgramRunner:
    """Runs what `RegionLowering` makes.

    Args:
        lowering: makes the programs.
    """

    def __init__(self, lowering: RegionLowering) -> None:
        self._lowering = lowering
        self.number = lowering.number

    @property
    def holdings(self) -> Holdings:
        """Of the model."""
        return self._lowering.runtime.holdings

    def bind(self, graph: MarkedGraph, args: Sequence[Any]) -> Binding:
        """The shards among the arguments of a graph."""
        leaves = (args[position] for _, position in graph.slots)
        return self.holdings.shards.bind(self.number, graph.direction, leaves)

    def forward(self, program: Program, binding: Binding, args: list[Any]) -> list[Any]:
        """Runs the program of a forward with what shards hold; keeps what is to stay gathered."""
        extra = program.convention.extra_args(binding.shards)
        for slot in program.convention.dropped:
            if binding.shards[slot].is_for_one_program:
                binding.shards[slot].reshard()
        return self._run(program, binding, args, extra)

    def run(self, program: Program, binding: Binding, args: list[Any]) -> list[Any]:
        """Runs any program with what shards hold; takes what it leaves unreduced, too."""
        convention, shards = program.convention, binding.shards
        kept_from_us = [*convention.unreduced, *convention.again, *convention.local]
        shared = _storages(args) if kept_from_us else set()
        extra = convention.extra_args(shards)
        for slot in convention.dropped:  # now, so that the program frees them
            shards[slot].let_go()
        for slot, pending in convention.added:
            if pending:
                shards[slot].pending = None
            else:
                shards[slot].held = None
        for slot in convention.partial:
            shards[slot].partial = None
        results = self._run(program, binding, args, extra)
        for slot, position in kept_from_us:
            grad, results[position] = results[position], None
            at = grad.untyped_storage().data_ptr()
            _take(shards[slot], grad, (slot, position), convention, at in shared)
            shared.add(at)
            self.holdings.shards.active.add(shards[slot].unit)
        return results

    def _run(self, program: Program, binding: Binding, args: list[Any], extra: list[Any]) -> list[Any]:
        runtime, convention = self._lowering.runtime, program.convention
        run = self._code(program, args)
        taken = [*args, *extra]
        args.clear()  # the program frees what forward saved as it goes
        extra.clear()
        results = list(run_program(runtime.context.name, program.record, run, taken, binding.shards))
        program.record.runs += 1
        if (executed := runtime.context.executed) is not None:
            executed.ran(program.record, binding.shards)
        if staying := len(convention.kept) + len(convention.resharded):
            stayed, results = results[-staying:], results[:-staying]
            shards, active = binding.shards, runtime.holdings.shards.active
            for slot, full in zip(convention.kept, stayed, strict=False):
                shards[slot].stay(full)
                active.add(shards[slot].unit)
            for slot, shard in zip(convention.resharded, stayed[len(convention.kept) :], strict=True):
                shards[slot].stay_post_forward(shard)
                active.add(shards[slot].unit)
        return results

    def _code(self, program: Program, args: list[Any]) -> BoxedCallable:
        """What runs with such arguments."""
        guards, runtime = self._lowering.guards, self._lowering.runtime
        if program.for_any_size is None or not (failed := guards.failed(args, program.record.direction == "backward")):
            return program.run
        runtime.context.report.say_once(
            f"{failed}: a program for others, as behind a graph break or in the backward of one of several forwards, "
            "runs as it is"
        )
        runtime.capture_each_size(failed)
        return program.for_any_size()


def _take(shard: Shard, grad: Tensor, place: tuple[int, int], convention: CallingConvention, shared: bool) -> None:
    """Leaves a gradient that is not reduced with its shard. `shared`: something else may hold its memory."""
    if place in convention.again:
        shard.add_pending(grad, shared)
    elif place in convention.local:
        shard.partial = grad.clone() if shared else grad
    else:
        shard.hold(grad, shared)


def _storages(values: Sequence[Any]) -> set[int]:
    """Addresses of the memory behind tensors."""
    return {value.untyped_storage().data_ptr() for value in values if isinstance(value, Tensor)}
