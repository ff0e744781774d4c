"""Cuts a lowered program into what runs by itself, node by node, and stretches of computation between.

Launches, waits and the copies of buckets run by themselves, in the order of the graph. What is computed between two of
them, or from one seam (``meta["seam"]``) to the next, is a stretch. Constants are made anew in each stretch that reads
them: equal blocks may read one that was made of many. Stretches with equal keys compute the same of other values: those
of equal blocks, and of programs of other flags.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.multiprocessing.reductions import StorageWeakRef

from graphshard.graph.gather_outputs import GATHER_INTO, KEEP_UNTIL
from graphshard.graph.ir import LAUNCHES, WAIT, checks_number, is_call, is_constant, output_args

_BY_ITSELF = frozenset((*LAUNCHES, WAIT, KEEP_UNTIL, GATHER_INTO))
_ALIGNMENT = 16
# So many operators whose sizes depend on values run by themselves; of more, a compiler is to see all.
_FEW = 16
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True, eq=False)
class Stretch:
    """Nodes that are computed together.

    Attributes:
        nodes: in order; constants, and what is read of the program's module, come first.
        inputs: nodes outside that they read, and then placeholders of symbols in their sizes.
        outputs: those of them that are read outside.
        shapes: where the symbols in their sizes have a meaning; None: there are none.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    shapes: object

    def key(self) -> tuple[object, ...]:
        """Equal for stretches that compute the same; names of nodes are not in it. It keeps their constants alive."""
        names = {node: f"i{place}" for place, node in enumerate(self.inputs)}
        names |= {node: f"n{place}" for place, node in enumerate(self.nodes)}
        lines = [_kind(node.meta.get("val")) for node in self.inputs]
        for node in self.nodes:
            args, kwargs = map_arg((node.args, node.kwargs), lambda read: _Name(names[read]))
            lines.append("get_attr" if node.op == "get_attr" else f"{node.target} {args} {kwargs}")
        lines.append(" ".join(names[node] for node in self.outputs))
        return "\n".join(lines), *(_attribute(node) for node in self.nodes if node.op == "get_attr")

    def module(self, gm: GraphModule) -> GraphModule:
        """The stretch as a graph of its own. `gm`: it is of."""
        graph, copies = Graph(), dict[Node, Node]()
        for place, node in enumerate(self.inputs):
            copies[node] = graph.placeholder(f"arg{place}_1")
            copies[node].meta = dict(node.meta)
        for node in self.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in self.outputs))
        return GraphModule(gm, graph)


class _Name(str):
    """A name in a key, printed as it is."""

    __slots__ = ()
    __repr__ = str.__str__


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device} {_is_aligned(value)}"
    return f"{type(value).__name__} {value.device if isinstance(value, torch.Generator) else value}"


def _is_aligned(value: Tensor) -> bool:
    """Whether Inductor may read it in vectors; where it begins otherwise is nothing to its code."""
    offset = value.storage_offset()
    return isinstance(offset, int) and offset * value.element_size() % _ALIGNMENT == 0


def _attribute(node: Node) -> object:
    """A tensor is equal to itself alone, and so is a graph that reads some."""
    found: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        found = getattr(found, name)
    if isinstance(found, GraphModule) and not any(found.graph.find_nodes(op="get_attr")):
        return found.code
    return found


def undivided(graph: Graph) -> str:
    """Why a program cannot be cut; ``""``: it can be."""
    if len(depending := _depending_on_values(graph)) > _FEW:
        return f"the sizes of {len(depending)} operators depend on values, as that of {depending[0].name}"
    for node in graph.nodes:
        if "with_effects" in str(node.target):
            return f"{node.name} has effects besides its results"
    return ""


def _depending_on_values(graph: Graph) -> list[Node]:
    """Operators with sizes, of theirs or of what they read, that depend on values."""
    sized = {node for node in graph.nodes if any(map(_is_of_value, _symbolic_sizes(node.meta.get("val"))))}
    return [
        node
        for node in graph.nodes
        if node.op == "call_function" and not sized.isdisjoint((node, *node.all_input_nodes))
    ]


def _is_of_value(size: Any) -> bool:
    return any(str(symbol).startswith(("u", "zuf")) for symbol in size.node.expr.free_symbols)


def cut(graph: Graph) -> list[Node | Stretch]:
    """What a program does, in order: nodes that run by themselves, and stretches."""
    found: list[Node | tuple[Node, ...]] = []
    running: dict[Node, None] = {}
    placed: set[Node] = set()
    remade = _remade(graph)
    alone = {node for node in graph.nodes if _runs_by_itself(node)}.union(_depending_on_values(graph))
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or node in placed:
            continue
        if node in alone:
            ends = node.target in _BY_ITSELF or node.meta.get("seam")
            if running and (ends or not running.keys().isdisjoint(node.all_input_nodes)):
                found.append(tuple(running))
                running.clear()
            found.append(node)
        elif node in remade:
            # With each stretch that reads it, and once for all else.
            if node.op != "get_attr" and not alone.isdisjoint(node.users):
                found.append(node)
        else:
            if running and node.meta.get("seam"):
                found.append(tuple(running))
                running.clear()
            parts = list(_with_parts(node))
            running.update(dict.fromkeys(parts))
            placed.update(parts)
    if running:
        found.append(tuple(running))
    symbols = _symbols(graph)
    return [
        nodes if isinstance(nodes, Node) else _alone(nodes, remade) or _stretch(nodes, symbols, remade)
        for nodes in found
    ]


def _alone(nodes: Sequence[Node], remade: Set[Node]) -> Node | None:
    """A stretch's only operator, with which there is nothing to fuse, where it does the same outside Inductor."""
    node, *others = nodes
    if others or not remade.isdisjoint(node.all_input_nodes):
        return None
    return node if str(node.target).startswith(("aten.", "prims.iota.")) else None


def _remade(graph: Graph) -> Set[Node]:
    """What each stretch that reads it has of its own. Results may share memory with each other, so what is in them is
    made once.
    """
    results = {_memory_of(node) for node in output_args(graph) if isinstance(node, Node)}
    constants = {node for node in graph.nodes if is_constant(node) and _memory_of(node) not in results}
    return constants.union(graph.find_nodes(op="get_attr"))


def _memory_of(node: Node) -> object:
    value = node.meta.get("val")
    return StorageWeakRef(value.untyped_storage()) if isinstance(value, Tensor) else node  # type: ignore[no-untyped-call]


def looks_up_seed(node: Node) -> bool:
    """Whether it takes one of a program's seeds by its number: all that is other in equal blocks with dropout."""
    return str(node.target) == "prims.inductor_lookup_seed.default"


def _runs_by_itself(node: Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        return _runs_by_itself(node.args[0])
    if node.target in _BY_ITSELF or looks_up_seed(node) or "bucket_of" in node.meta:
        return True
    if isinstance(node.meta.get("val"), _SYMBOLS) or checks_number(node):
        return True  # checks too: a stretch has no placeholder for a symbol that a check has made a number
    return any(is_call(user, GATHER_INTO) and user.kwargs["out"] is node for user in node.users)


def _with_parts(node: Node) -> Iterator[Node]:
    """A node, and those that take its results apart."""
    yield node
    for user in node.users:
        if is_call(user, operator.getitem):
            yield from _with_parts(user)


def _stretch(nodes: Sequence[Node], symbols: dict[str, Node], remade: Set[Node]) -> Stretch:
    inside = dict.fromkeys(nodes)
    read = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
    own = [node for node in read if node in remade]
    inputs = [node for node in read if node not in remade]
    sizes = [size for node in (*inputs, *nodes) for size in _symbolic_sizes(node.meta.get("val"))]
    needed = {str(symbol) for size in sizes for symbol in size.node.expr.free_symbols}
    inputs += [symbols[name] for name in sorted(needed & symbols.keys()) if symbols[name] not in read]
    shapes = sizes[0].node.shape_env if sizes else None
    outputs = tuple(node for node in nodes if any(user not in inside for user in node.users))
    return Stretch((*own, *nodes), tuple(inputs), outputs, shapes)


def _symbols(graph: Graph) -> dict[str, Node]:
    """Placeholders of single symbols, by name."""
    found: dict[str, Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            found.setdefault(str(value), node)
    return found


def _symbolic_sizes(value: Any) -> Iterator[Any]:
    """Of a value: what is a symbol, or computed from some."""
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from _symbolic_sizes(part)
    elif isinstance(value, Tensor):
        yield from (size for size in (*value.shape, *value.stride(), value.storage_offset()) if type(size) is not int)
    elif isinstance(value, _SYMBOLS):
        yield value
