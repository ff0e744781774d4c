"""What the flags of a program ask for, where a pass brings it in: what goes in and comes out besides.

Written from what `Flags` says, not from what the passes do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.fx import Graph, Node

from graphshard.graph.ir import PARTIAL, PassContext, is_call, output_args, reductions, spec_of
from graphshard.graph.markers import UNSHARD, ShardSpec
from graphshard.passes.apply_flags import HELD
from graphshard.passes.apply_residency import RANK, REJOINED, RESIDENT
from graphshard.validation.inputs import Drawing, value_of
from graphshard.validation.markers import Reductions, Values, post_forward_shard, shard_name
from graphshard.validation.unchecked import Unchecked

Brings = Literal["", "gathers", "gradients"]


@dataclass
class Asked:
    """What one pass brings into one graph.

    Attributes:
        ctx: of the pass.
        brings: which of the flags it brings in.
        before: the graph without it.
        after: the graph with it.
        full: by shard, what was gathered, and the spec it was gathered by; found while `before` runs.
    """

    ctx: PassContext
    brings: Brings
    before: Graph
    after: Graph
    full: dict[str, tuple[Values, ShardSpec]] = field(default_factory=dict)

    def seen(self, node: Node, values: Values) -> None:
        """Is told the values of a node."""
        if self.brings == "gathers" and is_call(node, UNSHARD):
            self.full[shard_name(node).removeprefix(REJOINED)] = values, spec_of(node)

    def reductions(self, drawing: Drawing, inputs: dict[str, Values]) -> Reductions:
        """How gradients are reduced while `before` runs; draws what was accumulated before."""
        found = Reductions(self.ctx, drawing.world, dict(inputs), self.brings == "gradients")
        if self.brings != "gradients":
            return found
        for node in self.after.find_nodes(op="placeholder"):
            if node.name not in inputs and node.name.startswith((HELD, PARTIAL)):
                found.inputs[node.name] = drawing.of(node.name, value_of(node))
        for name, _ in self.ctx.flags.added:
            held = found.held.setdefault(name, [])
            placeholder = HELD + name + "_" * len(held)
            if placeholder not in found.inputs:
                raise ValueError(f"want an argument %{placeholder}, for a gradient that was accumulated before")
            held.append(found.inputs[placeholder])
        return found

    def inputs(self, reductions: Reductions) -> dict[str, Values]:
        """Of `after`, what it has besides the inputs of `before`."""
        found = dict[str, Values]()
        for node in self.after.find_nodes(op="placeholder"):
            name = node.name
            if name in reductions.inputs:
                found[name] = reductions.inputs[name]
            elif self.brings == "gathers" and name.startswith(RESIDENT):
                found[name] = self._full(name.removeprefix(RESIDENT))
            elif self.brings == "gathers" and name.startswith(REJOINED):
                found[name] = self._post_forward(name.removeprefix(REJOINED), reductions)
            elif self.brings == "gathers" and name.startswith(RANK):
                world, group = reductions.world, name.removeprefix(RANK)
                places = [world.members(group, rank).index(rank) for rank in range(world.size)]
                device: Any = value_of(node)
                found[name] = [torch.tensor([place], device=device.device) for place in places]
            else:
                raise ValueError(f"has an argument %{name} that nothing asks for")
        return found

    def wanted(self, results: list[Values], reductions: Reductions) -> list[Values | None]:
        """What `after` is to return; None: nothing, where it returns nothing.

        Args:
            results: of `before`.
            reductions: it ran with.
        """
        want: list[Values | None] = [*results]
        if self.brings == "gathers":
            want += [self._full(name) for name in self.ctx.flags.kept]
            want += [self._post_forward(name, reductions) for name in self.ctx.flags.resharded]
            return want[: len(results)] if len(output_args(self.after)) == len(results) else want
        if self.brings != "gradients":
            return want
        reduced = set(reductions_of(self.before))
        for place, (old, new) in enumerate(zip(output_args(self.before), output_args(self.after), strict=False)):
            # Undefined gradients are 0 here: what depends on nothing else is, too.
            is_none = new is None and old is not None
            if is_none and ((self.ctx.flags.inputs_only and old in reduced) or _is_zero(results[place])):
                want[place] = None
        return want

    def _full(self, name: str) -> Values:
        if name not in self.full:
            raise Unchecked(f"%{name} is gathered nowhere in it")
        return self.full[name][0]

    def _post_forward(self, name: str, reductions: Reductions) -> Values:
        full, spec = self._full(name), self.full[name][1]
        count, group = self.ctx.params[name].post_forward or (0, "")
        world = reductions.world
        places = [world.members(group, rank).index(rank) for rank in range(world.size)]
        return [post_forward_shard(one, spec, count, place) for one, place in zip(full, places, strict=True)]


reductions_of = reductions


def _is_zero(values: list[Any]) -> bool:
    return all(isinstance(value, torch.Tensor) and not bool(value.count_nonzero()) for value in values)
