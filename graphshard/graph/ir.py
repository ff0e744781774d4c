"""What passes work on: an FX graph whose gathers and reductions are markers, then launches and waits.

A launch starts a collective and a wait yields its result; both are `torch.ops._c10d_functional` nodes. What a launch
carries is kept in its `Collective`, so that no pass, check or dump has to find it again from tensor operators.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor
from torch.fx import Graph, Node

from graphshard.fsdp2.settings import DEFAULT_SETTINGS, UnitSettings
from graphshard.graph.markers import REDUCE_GRAD, UNSHARD, ShardSpec
from graphshard.graph.plan import ProgramPlan
from graphshard.graph.user_comms import CUSTOM_ALL_GATHER, CUSTOM_REDUCE_SCATTER

Direction = Literal["captured", "inner", "joint", "forward", "backward", "inference"]
Kind = Literal["all_gather", "reduce_scatter", "all_reduce"]

_c10d = torch.ops._c10d_functional
# Where an activation enters a unit.
ALIAS = torch.ops.aten.alias.default
WAIT = _c10d.wait_tensor.default
_CONSTANTS = (torch.ops.aten.full.default, torch.ops.aten.scalar_tensor.default, torch.ops.prims.iota.default)
# Before the name of a shard: the argument with the gradient that an earlier backward reduced over the shards only.
PARTIAL = "partial_"
LAUNCHES: Mapping[Any, Kind] = {
    _c10d.all_gather_into_tensor.default: "all_gather",
    _c10d.reduce_scatter_tensor.default: "reduce_scatter",
    _c10d.all_reduce.default: "all_reduce",
    _c10d.all_gather_into_tensor_coalesced.default: "all_gather",
    _c10d.reduce_scatter_tensor_coalesced.default: "reduce_scatter",
    CUSTOM_ALL_GATHER: "all_gather",
    CUSTOM_REDUCE_SCATTER: "reduce_scatter",
}
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, COALESCED_ALL_GATHER, COALESCED_REDUCE_SCATTER, *_ = LAUNCHES

aten = torch.ops.aten
# They return a view where they can, but their schema does not say so.
_SILENT_VIEWS = frozenset({aten.reshape.default, aten._unsafe_view.default})  # noqa: SLF001


@dataclass(frozen=True)
class ParamRef:
    """One sharded parameter as passes see it: the same on every rank.

    Attributes:
        fqn: its name in the model (of the first instance, where equal blocks share the region).
        unit: name of its unit, ``""`` for the root's.
        index: its position in FSDP2's order inside the unit.
        size: full shape.
        shard_numel: elements of the padded shard of one rank.
        dtype: dtype of the parameter and its gradient.
        adds_in_reduce_dtype: whether a gradient is cast before it is added to what was accumulated.
        dim: that is sharded.
        post_forward: (number of shards, process group) that the parameter is resharded to after forward, where that is
            another group than the one it is sharded over.
    """

    fqn: str
    unit: str
    index: int
    size: tuple[int, ...]
    shard_numel: int
    dtype: torch.dtype
    adds_in_reduce_dtype: bool = False
    dim: int = 0
    post_forward: tuple[int, str] | None = None


@dataclass(frozen=True)
class Flags:
    """What the run-time state asks of one program. Names are those of placeholders of shards, unless it says otherwise.

    Extra arguments come behind the graph's own, extra results behind its own, each in the order of the attributes here.

    Attributes:
        resident: shards whose gathered value comes as an extra argument.
        rejoined: shards that are gathered from post-forward shards, which come as extra arguments.
        kept: shards whose gathered value is an extra result.
        resharded: shards of which a post-forward shard is an extra result. (`reshard_after_forward` as an int)
        unreduced: shards whose gradients are handed out unreduced, to be accumulated.
        added: (shard, dtype) of earlier, unreduced gradients that come as extra arguments, to be added in this order.
        partial: shards whose earlier gradients, reduced over the shards but not over their copies, come as extra
            arguments.
        undefined: tangents that got no gradient, of outputs that the loss does not depend on.
        inputs_only: whether no parameter is to get a gradient.
        units: settings by name of unit, where they are not the defaults.
    """

    resident: tuple[str, ...] = ()
    rejoined: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    resharded: tuple[str, ...] = ()
    unreduced: frozenset[str] = frozenset()
    added: tuple[tuple[str, torch.dtype], ...] = ()
    partial: tuple[str, ...] = ()
    undefined: frozenset[str] = frozenset()
    inputs_only: bool = False
    units: tuple[tuple[str, UnitSettings], ...] = ()

    def __str__(self) -> str:
        parts = []
        for name in ("resident", "rejoined", "kept", "resharded", "unreduced", "added", "partial"):
            if value := getattr(self, name):
                parts.append(f"{name}={len(value)}")
        if self.undefined:
            parts.append(f"undefined={','.join(sorted(self.undefined))}")
        if self.inputs_only:
            parts.append("inputs_only")
        parts += [f"{unit or 'root'}({settings})" for unit, settings in self.units]
        return " ".join(parts) or "default"

    def settings(self, unit: str) -> UnitSettings:
        """The settings of a unit."""
        return dict(self.units).get(unit, DEFAULT_SETTINGS)


@dataclass(frozen=True)
class PassContext:
    """What a pass may know besides the graph.

    Attributes:
        direction: which graph this is; inner: of one that was captured.
        params: the sharded parameters by the name of the placeholder that holds their shard.
        flags: the run-time state that the program is lowered for.
        planner: chooses buckets and their places for the marked graph; None: FSDP2's.
        outlines: whether what it places stays at the seams of equal blocks, which are compiled once.
        fuses: whether copies to and from flat buffers become one operator each.
        coalesces: whether a bucket is sent without a flat buffer: takes ``"gather"`` or ``"reduce"`` and its members,
            as `member_names` names them; None: no bucket is.
        without: names of optional passes that are left out.
    """

    direction: Direction
    params: Mapping[str, ParamRef] = field(default_factory=dict)
    flags: Flags = Flags()
    planner: Callable[[Graph, PassContext], ProgramPlan | None] | None = None
    outlines: bool = False
    fuses: bool = False
    coalesces: Callable[[str, Sequence[str]], bool] | None = None
    without: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Member:
    """One parameter inside a bucket: `shard_numel` elements of `dtype` of each rank's part.

    `offset_numel` counts elements of the bucket, which are bytes where members differ in dtype.
    """

    fqn: str
    offset_numel: int
    shard_numel: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Collective:
    """What one launch carries, kept in ``meta["collective"]`` of the launch node."""

    kind: Kind
    bucket: str
    unit: str
    group: str
    world_size: int
    dtype: torch.dtype
    op: str | None
    members: tuple[Member, ...]

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's part: the input of an all-gather, the output of a reduce-scatter."""
        return sum(member.shard_numel * member.dtype.itemsize for member in self.members) // self.dtype.itemsize


def is_call(node: object, target: Any) -> TypeGuard[Node]:
    """Whether `node` is a call of `target`."""
    return isinstance(node, Node) and node.op == "call_function" and node.target is target


def unshards(graph: Graph) -> list[Node]:
    """All `graphshard::unshard` nodes in graph order."""
    return list(graph.find_nodes(op="call_function", target=UNSHARD))


def reductions(graph: Graph) -> list[Node]:
    """All `graphshard::reduce_grad` nodes in graph order."""
    return list(graph.find_nodes(op="call_function", target=REDUCE_GRAD))


def is_marker(node: Node) -> bool:
    """Whether `node` stands for a gather or a reduction."""
    return is_call(node, UNSHARD) or is_call(node, REDUCE_GRAD)


def is_cast(node: Node) -> bool:
    """Whether the result of `node` is its first argument in another dtype."""
    if is_call(node, aten._to_copy.default):  # noqa: SLF001
        return set(node.kwargs) == {"dtype"}
    return is_call(node, torch.ops.prims.convert_element_type.default)


def is_constant(node: Node) -> bool:
    """Whether it makes the same tensor wherever it stands, of numbers alone."""
    return node.op == "call_function" and node.target in _CONSTANTS and not node.all_input_nodes


def launches(graph: Graph) -> list[Node]:
    """All launches in graph order, the model's own collectives included."""
    found = (graph.find_nodes(op="call_function", target=target, sort=False) for target in LAUNCHES)
    return sorted(node for nodes in found for node in nodes)


def waits_of(launch: Node) -> list[Node]:
    """The waits of a launch: one, or one for each tensor of a coalesced collective."""
    results = [user for user in launch.users if is_call(user, operator.getitem)] or [launch]
    return [user for result in results for user in result.users if is_call(user, WAIT)]


def collective(node: Node) -> Collective | None:
    """The `Collective` of a launch that graphshard inserted, else None."""
    found: Collective | None = node.meta.get("collective")
    return found


def may_view(node: Node) -> bool:
    """Whether the result of `node` may share memory with an argument."""
    return node.op == "call_function" and _may_return_view(node.target)


@lru_cache(maxsize=4096)
def _may_return_view(target: Any) -> bool:
    return target in _SILENT_VIEWS or target is operator.getitem or declares_view(target)


@lru_cache(maxsize=4096)
def checks_number(node: Node) -> bool:
    """Whether it checks a number that was read off a value; it yields nothing."""
    return is_call(node, aten._assert_scalar.default)  # noqa: SLF001


def declares_view(target: Any) -> bool:
    """Whether an operator's schema says that results share memory with arguments."""
    return any(result.alias_info for result in getattr(getattr(target, "_schema", None), "returns", ()))


def is_tangent(node: Node) -> bool:
    """Whether `node` is the placeholder of a gradient of an output."""
    return node.op == "placeholder" and str(node.target).startswith("tangents")


def spec_of(marker: Node) -> ShardSpec:
    """The spec of a marker."""
    text = marker.args[1 if is_call(marker, UNSHARD) else 2]
    assert isinstance(text, str), marker
    return ShardSpec.parse(text)


def shard_placeholder(marker: Node) -> Node:
    """The placeholder of the shard that a marker reads: its first argument (unshard) or second (reduce_grad)."""
    node = marker.args[0] if is_call(marker, UNSHARD) else marker.args[1]
    while isinstance(node, Node) and may_view(node):
        node = node.args[0]
    if not isinstance(node, Node) or node.op != "placeholder":
        raise AssertionError(f"{marker}: its shard comes from {node}, want a placeholder of the graph")
    return node


def gathered_source(marker: Node) -> Node:
    """What an unshard gathers: its shard, or what a tensor subclass sends in its place."""
    found = marker.args[2] if len(marker.args) > 2 else marker.args[0]
    assert isinstance(found, Node), marker
    return found


def bucket_key(node: Node, ctx: PassContext) -> tuple[object, ...]:
    """What markers must have in common to share a bucket: ``"gather"`` or ``"reduce"`` comes first."""
    spec, settings = spec_of(node), ctx.flags.settings(ctx.params[shard_placeholder(node).name].unit)
    settings = settings.without_prefetch()
    if is_call(node, UNSHARD):
        return "gather", settings, spec.world_size, spec.group, spec.device
    copies = (spec.replicas, spec.replicate_group)
    return (
        "reduce",
        settings,
        spec.world_size,
        spec.group,
        *copies,
        spec.reduce_dtype,
        val(node).dtype,
        val(node).device,
    )


def member_names(markers: Sequence[Node], ctx: PassContext) -> dict[str, Node]:
    """Markers of one kind by the name that plans call them: the FQN, ``fqn#2`` for its second marker in graph order."""
    seen: Counter[str] = Counter()
    found = {}
    for node in markers:
        fqn = ctx.params[shard_placeholder(node).name].fqn
        seen[fqn] += 1
        found[fqn if seen[fqn] == 1 else f"{fqn}#{seen[fqn]}"] = node
    return found


def output_args(graph: Graph) -> list[Any]:
    """The flat results of the graph: nodes, None, and numbers, as of a length that the trace has made a constant."""
    results = output_node(graph).args[0]
    return list(results) if isinstance(results, (tuple, list)) else [results]


def output_node(graph: Graph) -> Node:
    """The output node."""
    output: Node = next(iter(graph.find_nodes(op="output")))
    return output


def launch_counts(graph: Graph) -> dict[str, int]:
    """How many launches of each kind a graph has."""
    counts = Counter(LAUNCHES[node.target] for node in launches(graph))
    return {str(kind): count for kind, count in counts.items()}


def fake_empty(like: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """A contiguous fake tensor of the fake mode, and without `device` on the device, of another fake value."""
    with like.fake_mode:
        return torch.empty(tuple(shape), dtype=dtype, device=device or like.device)


def val(node: Any) -> Any:
    """The fake value of a node."""
    return node.meta["val"]


def fake(args: Any) -> Any:
    """`args` with every node replaced by its fake value."""
    return torch.fx.node.map_arg(args, lambda node: node.meta["val"])
