"""Equal blocks of a graph that Dynamo captured: what is computed the same, of other values, one behind the other.

Such a graph has Dynamo's fake values (``meta["example_value"]``), and is not functional yet.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from graphshard.compat.dynamo import (
    AttentionKernels,
    changes_mode,
    checkpoint_policy,
    is_wrapper,
    only_logs,
    sets_grad_mode,
)
from graphshard.compat.tensors import is_torch_operator, size_key, version
from graphshard.graph.block_calls import PASS_ON
from graphshard.graph.ir import ALIAS, ParamRef, checks_number, is_call, is_marker
from graphshard.graph.repeats import Repeat, find_repeats
from graphshard.graph.unit_borders import Read, crossings, equal_parts, has_equal_parts, unit_borders

# Fewer or shorter blocks are not worth it: a body is traced in the time of about two blocks. What repeats so seldom may
# be less than a block: an own part of each unit is not.
_LEAST_REPEATS = 4
_LEAST_BLOCKS = 3
_LEAST_NODES = 4
_SIZES = (int, torch.SymInt)
_NUMBERS = (bool, float, torch.SymBool, torch.SymFloat)


@dataclass(frozen=True, eq=False)
class Block:
    """Nodes that are one block.

    Attributes:
        nodes: in order.
        inputs: tensors of others that they read.
        outputs: those that others read.
        passed: inputs that get a gradient from what reads them behind the block, too.
        sizes: symbolic sizes of others that they read, in order -> the input, and the dim of it, of that size; None: it
            is computed of such ones, and is so again in the block.
        lost: other sizes that they read, and those that they yield.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    passed: tuple[Node, ...]
    sizes: Mapping[Node, tuple[Node, int] | None] = field(default_factory=dict)
    lost: tuple[Node, ...] = ()

    def key(self) -> tuple[str, ...]:
        """Equal for blocks that compute the same."""
        names = {node: f"i{place}" for place, node in enumerate(self.inputs)}
        names |= {node: f"l{place}" for place, node in enumerate(self.lost)}
        names |= {node: f"n{place}" for place, node in enumerate(self.nodes)}
        lines = [kind_of(node) for node in (*self.inputs, *self.lost)]
        for place, (node, where) in enumerate(self.sizes.items()):
            if where is not None:
                lines.append(f"{names[where[0]]} {where[1]}")
            names[node] = f"s{place}"
        for node in (*(node for node, where in self.sizes.items() if where is None), *self.nodes):
            args = map_arg((node.args, node.kwargs), lambda read: _Name(names[read]))
            lines.append(f"{_target(node)} {args} {kind_of(node)}")
        return *lines, " ".join(names[node] for node in (*self.outputs, *self.passed))

    def passes_what_is_written(self) -> bool:
        """Whether something writes, in place, what others read behind the block: it would write into a copy."""
        handed = filter(self._hands_on, self.outputs)
        values = (value_of_captured(node) for node in (*self.passed, *handed))
        return any(not value.is_inference() and version(value) > 0 for value in values)

    def is_lazy(self) -> bool:
        """Whether a value that goes in or out is still to be conjugated or negated."""
        values = (value_of_captured(node) for node in (*self.inputs, *self.outputs))
        return any(isinstance(value, Tensor) and (value.is_conj() or value.is_neg()) for value in values)

    def _hands_on(self, node: Node) -> bool:
        """Whether it is an input by another name (`capture.unit_inputs`)."""
        return is_call(node, ALIAS) and node.args[0] in self.inputs

    def module(self, gm: GraphModule) -> GraphModule:
        """The block as a graph of its own: takes `inputs`, returns `outputs` and `passed`; the latter, and aliases of
        inputs, by `PASS_ON`, so that a trace has gradients of theirs.

        Args:
            gm: it is of.
        """
        graph, copies = Graph(), dict[Node, Node]()
        for place, node in enumerate(self.inputs):
            copies[node] = graph.placeholder(f"arg{place}_1")
        for node, where in self.sizes.items():
            if where is None:
                copies[node] = graph.node_copy(node, copies.__getitem__)
            else:
                copies[node] = graph.call_method("size", (copies[where[0]], where[1]))
        for node in self.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        # Behind all else, so that its gradient comes first, as that of what is read behind the block does.
        given = {node for node in self.outputs if self._hands_on(node)}.union(self.passed)
        returned = (*self.outputs, *self.passed)
        graph.output(
            tuple(graph.call_function(PASS_ON, (copies[node],)) if node in given else copies[node] for node in returned)
        )
        return GraphModule(gm, graph)


class _Name(str):
    """A name in a key, printed as it is."""

    __slots__ = ()
    __repr__ = str.__str__


def find_blocks(graph: Graph, params: Mapping[str, ParamRef]) -> list[list[Block]]:
    """Groups of equal blocks; no two blocks share a node. None begins or ends where modes are not what they are around
    the graph: gradients switched off, autocast, `torch.vmap`, `sdpa_kernel`. `params`: by the name of the placeholder
    that holds their shard.
    """
    nodes = [node for node in graph.nodes if node.op != "placeholder" and not only_logs(node)]
    number = {node: place for place, node in enumerate(nodes)}
    fit, edges = _fit(nodes)
    # What does not fit equals nothing.
    items = [_item(node) if node in fit else number[node] for node in nodes]
    edges = {place for place in edges if not _takes_apart(nodes[place])}
    crossing = crossings(nodes, number, lambda node: 1)
    borders = unit_borders(_reads(graph, number, params), crossing, edges.__contains__, items)
    sizes = [*map(_size, nodes)]
    of_units = equal_parts(items, borders, set(), _LEAST_REPEATS, _LEAST_NODES, sizes)
    parts: list[range] = []
    taken: set[int] = set()
    for repeat in find_repeats(items, _LEAST_REPEATS, 1):
        if sum(sizes[repeat.first : repeat.first + repeat.period]) < _LEAST_NODES:
            continue
        if not has_equal_parts(repeat, of_units):
            own = [part for part in _cut(nodes, number, items, edges, repeat) if taken.isdisjoint(part)]
            taken.update(place for part in own for place in part)
            parts += own
    for equal in equal_parts(items, borders, taken, _LEAST_BLOCKS, _LEAST_NODES, sizes):
        parts += [part for part in equal if _ends_at(part, edges, len(nodes))]
    found: dict[tuple[str, ...], list[Block]] = {}
    for part in sorted(parts, key=lambda part: part.start):
        if (block := _block(nodes[part.start : part.stop], number)) is not None:
            found.setdefault(block.key(), []).append(block)
    return [blocks for blocks in found.values() if len(blocks) >= _LEAST_BLOCKS]


def _ends_at(part: range, edges: Set[int], end: int) -> bool:
    return part.stop in edges or part.stop == end


def _reads(graph: Graph, number: Mapping[Node, int], params: Mapping[str, ParamRef]) -> list[Read]:
    """Where shards are read, in order."""
    found = []
    for placeholder in graph.find_nodes(op="placeholder"):
        if (param := params.get(placeholder.name)) is not None:
            for node in filter(number.__contains__, placeholder.users):
                gathered = node.users if is_marker(node) else ()
                last = max((number.get(user, 0) for user in gathered), default=0)
                found.append(Read(number[node], max(number[node], last), param.unit))
    return sorted(found)


def _fit(nodes: Sequence[Node]) -> tuple[set[Node], set[int]]:
    """Nodes that may be in a block, and places before which one may begin or end."""
    found: set[Node] = set()
    edges: set[int] = set()
    grad, kernels, depth = ambient = torch.is_grad_enabled(), AttentionKernels.now(), 0
    for place, node in enumerate(nodes):
        if (grad, kernels, depth) == ambient:
            edges.add(place)
        value = value_of_captured(node)
        if (enabled := sets_grad_mode(node)) is not None:
            grad = enabled
            found.add(node)
        elif (change := changes_mode(node)) is not None:
            depth += change
            found.add(node)
        elif (others := kernels.behind(node)) is not None:
            kernels = others
            found.add(node)
        elif node.op == "get_attr":
            if isinstance(_attribute(node), GraphModule):
                found.add(node)
        elif node.op in ("call_function", "call_method"):
            if isinstance(value, _NUMBERS) or checks_number(node):
                continue  # read off values, or checks of such
            if not isinstance(value, (Tensor, tuple, list, *_SIZES)) and node.target is not operator.setitem:
                break  # it may set anything
            if not any(is_wrapper(part) for part in _parts(value)):
                found.add(node)
    return found, edges


def _cut(
    nodes: Sequence[Node], number: Mapping[Node, int], items: Sequence[object], edges: Set[int], repeat: Repeat
) -> Iterator[range]:
    """Blocks of a repeat, cut where the fewest values go from one to the next."""
    first, period, end = repeat.first, repeat.period, repeat.end
    while end < len(nodes) and items[end] == items[end - period]:
        end += 1
    crossing = [0] * period
    for place in range(first, first + period):
        last = max(map(number.__getitem__, nodes[place].users), default=place)
        for across in range(place + 1, min(last, place + period) + 1):
            crossing[(across - first) % period] += 1
    shifts = [shift for shift in range(period) if first + shift in edges]
    if not shifts:
        return
    shift = min(shifts, key=lambda shift: (crossing[shift], shift))
    for begin in range(first + shift, end - period + 1, period):
        if {begin, begin + period} <= edges:
            yield range(begin, begin + period)


def _takes_apart(node: Node) -> bool:
    """Whether it takes one of the results of what it reads."""
    return is_call(node, operator.getitem) and any(
        isinstance(value_of_captured(read), (tuple, list)) for read in node.all_input_nodes
    )


def _block(nodes: Sequence[Node], number: Mapping[Node, int]) -> Block | None:
    """None: something goes in or out that is neither a plain tensor nor a size."""
    inside, last = set(nodes), number[nodes[-1]]
    read = dict.fromkeys(read for node in nodes for read in node.all_input_nodes if read not in inside)
    inputs = tuple(node for node in read if isinstance(value_of_captured(node), Tensor))
    outputs = tuple(node for node in nodes if any(user not in inside for user in node.users))
    values = [value_of_captured(node) for node in (*read, *outputs)]
    if not all(isinstance(value, _SIZES) or (isinstance(value, Tensor) and not is_wrapper(value)) for value in values):
        return None
    sizes: dict[Node, tuple[Node, int] | None] = {}
    lost = [node for node in read if node not in inputs and not _find_size(node, inputs, sizes)]
    lost += [node for node in outputs if not isinstance(value_of_captured(node), Tensor)]
    again = (node for node in inputs if any(number[user] > last and _brings_gradient(user) for user in node.users))
    passed = (node for node in again if getattr(value_of_captured(node), "requires_grad", False))
    return Block(tuple(nodes), inputs, outputs, tuple(passed), sizes, tuple(lost))


def _find_size(node: Node, inputs: Sequence[Node], sizes: dict[Node, tuple[Node, int] | None]) -> bool:
    """Finds out where a block gets a symbolic size from, and adds it to `sizes`; whether it can."""
    size = value_of_captured(node)
    if not isinstance(size, torch.SymInt):
        return False
    if node not in sizes:
        dims = ((tensor, dim, one) for tensor in inputs for dim, one in enumerate(value_of_captured(tensor).shape))
        where = next(((tensor, dim) for tensor, dim, one in dims if size_key(one) == size_key(size)), None)
        of = node.all_input_nodes
        if where is None and not (of and all(_find_size(one, inputs, sizes) for one in of)):
            return False
        sizes[node] = where
    return True


def _brings_gradient(user: Node) -> bool:
    """Whether what a node reads may get a gradient from it."""
    return user.op == "output" or any(getattr(v, "requires_grad", False) for v in _parts(value_of_captured(user)))


def _size(node: Node) -> int:
    """How many nodes it stands for: one, or those of an inner graph."""
    inner = _attribute(node) if node.op == "get_attr" else None
    return len(inner.graph.nodes) if isinstance(inner, GraphModule) else 1


def described(node: Node) -> str:
    """What a node does and yields, whatever it and what it reads are called."""
    return f"{_target(node)} {kind_of(node)}"


def _item(node: Node) -> str:
    """What a node does, whatever its arguments are called."""
    args = map_arg((node.args, node.kwargs), lambda read: _Name(kind_of(read)))
    return f"{_target(node)} {args} {kind_of(node)}"


def _target(node: Node) -> str:
    if node.op == "get_attr":
        return kind_of(node)
    return f"{node.op} {node.target}"


def kind_of(node: Node) -> str:
    """What a node yields: dtype, shape, strides, device, if a gradient is needed; of an inner graph what it does."""
    if node.op == "get_attr" and isinstance(found := _attribute(node), GraphModule):
        kind, policy = _graph_kind(found.graph), checkpoint_policy(found)
        return f"{kind or node.target}{'' if policy is None else _function_text(policy)}"
    return " ".join(map(_value_text, _parts(value_of_captured(node))))


def _function_text(value: object) -> str:
    """The same for functions that do the same: of one code, with the same objects in their closures and partials."""
    if isinstance(value, partial):
        return f"partial {_function_text((value.func, value.args, tuple(value.keywords.items())))}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} ({' '.join(map(_function_text, value))})"
    if isinstance(value, FunctionType):
        cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
        return f"function {id(value.__code__)} {_function_text((value.__defaults__, *cells))}"
    return f"{value!r}" if isinstance(value, (str, int)) or is_torch_operator(value) else f"object {id(value)}"


def _graph_kind(graph: Graph) -> str:
    """What an inner graph computes, whatever its nodes are called; ``""``: it reads tensors, so that no other equals
    it.
    """
    names = {node: f"g{place}" for place, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        if node.op == "get_attr":
            return ""
        args = map_arg((node.args, node.kwargs), lambda read: _Name(names[read]))
        lines.append(f"{node.op} {'' if node.op == 'placeholder' else node.target} {args} {kind_of(node)}")
    return "; ".join(lines)


def _value_text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device} {value.requires_grad}"
    return f"{type(value).__name__} {value}"


def _attribute(node: Node) -> object:
    found: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        found = getattr(found, name)
    return found


def value_of_captured(node: Node) -> Any:
    """Dynamo's fake value of a node, or what the node reads of the module."""
    return _attribute(node) if node.op == "get_attr" else node.meta.get("example_value")


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from _parts(part)
    else:
        yield value
