"""A graph before a pass and after it, on the same inputs: do they compute the same?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from graphshard import env
from graphshard.compat.tensors import no_fake_mode, size_hint
from graphshard.errors import PassFailed
from graphshard.graph.ir import PassContext, output_args, reductions, spec_of, unshards
from graphshard.graph.sameness import Bitwise, Sameness
from graphshard.validation.asked import Asked, Brings
from graphshard.validation.captured import Captured, captured_inputs
from graphshard.validation.differences import (
    Difference,
    ancestors,
    first_difference,
    first_differing_node,
    result_names,
)
from graphshard.validation.inputs import DRAWS, KINDS, Draw, Drawing, specs_of, value_of
from graphshard.validation.lockstep import LockStep, NodeFailed, alone
from graphshard.validation.markers import Reductions, Values
from graphshard.validation.reproducer import write_reproducer
from graphshard.validation.unchecked import Unchecked
from graphshard.validation.world import World, world_of

_TRACED = ("captured", "inner")
_MIB = 2**20


@dataclass(frozen=True)
class _Ran:
    """One run: results, then inputs as they are in the end, by their names; all of every rank."""

    results: list[Values]
    given: dict[str, Values]  # as they were
    left: dict[str, Values]


@dataclass
class Before:
    """A graph before a pass.

    Args:
        graph: it is copied.
        ctx: of the pass.
        blocks: what calls of blocks stand for in a captured graph that gets some.
    """

    graph: Graph
    ctx: PassContext
    blocks: Mapping[str, GraphModule] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._text = _text(self.graph)
        self.graph = _copied(self.graph)

    def check(self, after: Graph, step: str, title: str, sameness: Sameness | None = None, brings: Brings = "") -> str:
        """Compares with the graph after the pass.

        Args:
            after: that graph.
            step: name of the pass.
            title: of the graph, for a reproducer.
            sameness: how alike results are to be; None: bitwise.
            brings: which of the flags the pass brings in.

        Returns:
            Why it could not be compared; ``""``: it was, or the pass has changed no operator and no argument.

        Raises:
            PassFailed: results differ; names the pass, the result, the node, and the folder of a reproducer.
        """
        if not brings and _text(after) == self._text:
            return ""
        comparison = _Comparison(self.graph, _copied(after), self.ctx, self.blocks, sameness or Bitwise(), brings)
        try:
            with alone():
                difference = comparison.difference()
                if difference is None:
                    return ""
                where = comparison.first_node(difference)
        except Unchecked as why:
            return str(why)
        with no_fake_mode():
            folder = write_reproducer(title, step, comparison.reproducer(difference))
        node = f", first in %{where}" if where else ""
        raise PassFailed(f"pass {step} of {title} changes what is computed: {difference}{node}; {folder}")


class _Comparison:
    """Runs both graphs."""

    def __init__(
        self,
        before: Graph,
        after: Graph,
        ctx: PassContext,
        blocks: Mapping[str, GraphModule],
        sameness: Sameness,
        brings: Brings,
    ) -> None:
        self.before, self.after, self.ctx, self.sameness = before, after, ctx, sameness
        self._blocks, self._is_traced = blocks, ctx.direction in _TRACED
        self.asked = Asked(ctx, brings, before, after)
        self._draw: Draw = DRAWS[0]
        self._world: World | None = None

    def difference(self) -> Difference | None:
        """The first; None: there is none."""
        _check_size(self.before, self.world)
        ran, reduced = self._first_run()
        try:
            other = self._run_after(ran, reduced)
            want = self.asked.wanted(ran.results, reduced)
        except (NodeFailed, ValueError) as error:
            return Difference(0, "output", 0, f"after it, {error}")
        self.ran, self.want, self.other = ran, want, other
        names = result_names(output_args(self.after))
        names += [f"the gradient of input {place}" for place in range(len(other.results) - len(names))]
        found = first_difference(other.results, want, names, self.sameness, self._coarsest)
        if found is None:
            common = [name for name in ran.left if name in other.left]
            ours, theirs = ([one.left[name] for name in common] for one in (other, ran))
            found = first_difference(ours, theirs, common, self.sameness, self._coarsest, None)
        if found is not None and not self._is_repeatable(ran):
            raise Unchecked("it computes something else each time that it is run")
        return found

    @property
    def world(self) -> World:
        """That both run in."""
        if self._world is None:
            self._world = world_of((self.before, self.after), self.ctx)
        return self._world

    def first_node(self, difference: Difference) -> str:
        """Name of the first node that has another value; ``""``: none of those that are in both graphs."""
        if difference.says.startswith("after it"):
            return ""
        among = ancestors(self.after, difference.name)
        if difference.result is None or not among:
            among = frozenset(node.name for node in self.after.nodes)
        try:
            return first_differing_node(
                lambda seen: self._run_before(self._draw, seen),
                lambda seen: self._run_after(self.ran, self.reduced, seen),
                among,
            )
        except NodeFailed:
            return ""

    def reproducer(self, difference: Difference) -> dict[str, Any]:
        """What a reproducer is made of."""
        other = getattr(self, "other", None)
        return {
            "before": self.before,
            "after": self.after,
            "ctx": self.ctx,
            "sameness": self.sameness,
            "world": self.world,
            "result": difference.result if other is not None else None,
            "inputs": (self.ran.given if other else {}, other.given if other else {}),
            "want": self.want if other else [],
            "says": str(difference),
            "reruns_before": not self.asked.brings,
        }

    @property
    def _coarsest(self) -> torch.dtype:
        markers = [*unshards(self.before), *reductions(self.before)]
        dtypes = [dtype for node in markers for dtype in (spec_of(node).dtype, spec_of(node).reduce_dtype)]
        floating = [dtype for dtype in dtypes if dtype.is_floating_point]
        return max(floating, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)

    def _first_run(self) -> tuple[_Ran, Reductions]:
        """The first way to draw inputs whose results are numbers; else the last that runs."""
        found, failure = None, ""
        for draw in DRAWS:
            try:
                found = draw, *self._run_before(draw)
            except NodeFailed as error:
                failure = str(error)
                continue
            if all(_is_finite(value) for values in found[1].results for value in values):
                break
        if found is None:
            raise Unchecked(f"before it, {failure}, with inputs that are made up")
        self._draw, ran, self.reduced = found
        return ran, self.reduced

    def _is_repeatable(self, ran: _Ran) -> bool:
        again, _ = self._run_before(self._draw)
        names = [""] * len(ran.results)
        return first_difference(again.results, ran.results, names, Bitwise(), torch.float64) is None

    def _drawing(self, draw: Draw) -> Drawing:
        return Drawing(self.world, draw, specs_of(self.before), self.ctx.flags.undefined)

    def _run_before(self, draw: Draw, seen: Callable[[Node, Values], None] | None = None) -> tuple[_Ran, Reductions]:
        drawing = self._drawing(draw)
        if self._is_traced:
            inputs = captured_inputs(self.before, drawing)
        else:
            inputs = [drawing.of(node.name, value_of(node)) for node in self.before.find_nodes(op="placeholder")]
        reduced = self.asked.reductions(drawing, _named(self.before, inputs))

        def tell(node: Node, values: Values) -> None:
            self.asked.seen(node, values)
            if seen is not None:
                seen(node, values)

        return self._run(self.before, inputs, reduced, tell), reduced

    def _run_after(self, ran: _Ran, reduced: Reductions, seen: Callable[[Node, Values], None] | None = None) -> _Ran:
        given = Reductions(self.ctx, self.world, dict(reduced.inputs))
        if self._is_traced:
            inputs = captured_inputs(self.after, self._drawing(self._draw))
        else:
            more = self.asked.inputs(reduced)
            names = [node.name for node in self.after.find_nodes(op="placeholder")]
            inputs = [ran.given.get(name) or more[name] for name in names]
        given.inputs |= _named(self.after, inputs)
        return self._run(self.after, inputs, given, seen)

    def _run(
        self, graph: Graph, inputs: list[Values], reduced: Reductions, seen: Callable[[Node, Values], None] | None
    ) -> _Ran:
        torch.manual_seed(0)
        given, used = _named(graph, inputs), [_apart(values) for values in inputs]
        reduced.inputs |= _named(graph, used)
        if self._is_traced:
            results = Captured(reduced, self._blocks).run(graph, used)
        else:
            with torch.no_grad():
                results = LockStep(reduced, seen=seen).run(graph, used)
        left = {name: [_plain(value) for value in values] for name, values in _named(graph, used).items()}
        return _Ran([[_plain(value) for value in values] for values in results], given, left)


def _named(graph: Graph, inputs: list[Values]) -> dict[str, Values]:
    names = (node.name for node in graph.find_nodes(op="placeholder"))
    return dict(zip(names, inputs, strict=True))


def _apart(values: Values) -> Values:
    """Copies that a graph may write, shared as the values are."""
    copies: dict[int, Any] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        flat = value.detach().clone(memory_format=torch.preserve_format)
        like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return (like.copy_(flat) if flat.stride() != value.stride() else flat).requires_grad_(value.requires_grad)

    return [copies[id(value)] if id(value) in copies else copies.setdefault(id(value), copy(value)) for value in values]


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _is_finite(value: Any) -> bool:
    return not (isinstance(value, Tensor) and value.dtype.is_floating_point) or bool(value.isfinite().all())


def _copied(graph: Graph) -> Graph:
    copy = Graph(owning_module=graph.owning_module)
    copy.output(copy.graph_copy(graph, {}))
    return copy


def _text(graph: Graph) -> str:
    return "\n".join(f"{node.name} {node.op} {node.target} {node.args} {node.kwargs}" for node in graph.nodes)


def _check_size(graph: Graph, world: World) -> None:
    """Raises:
    Unchecked: a run would make more bytes than are allowed.
    """
    total = sum(_nbytes(value_of(node)) for node in graph.nodes) * min(KINDS, world.size)
    total += sum(_nbytes(value_of(node)) for node in graph.find_nodes(op="placeholder")) * world.size
    if total > (limit := env.verify_limit_mib()) * _MIB:
        raise Unchecked(f"its values would take {total / _MIB:.0f} MiB, more than GRAPHSHARD_VERIFY_MIB={limit} allows")


def _nbytes(value: object) -> int:
    if isinstance(value, (tuple, list)):
        return sum(map(_nbytes, value))
    if not isinstance(value, Tensor):
        return 0
    total = value.dtype.itemsize
    for size in value.shape:
        total *= size_hint(size, 2)
    return total
