"""Reads of parameters in branches and bodies of loops move in front of them: whether a branch is taken, and how often a
body runs, may differ from rank to rank, and what is sent must not.

Needs: a graph as Dynamo captured it, of whose inner graphs no inner one reads a parameter any more. Leaves: inner
graphs of control flow that get what they used to gather.

    true: %w = unshard(%s);  mm(%x, %w)          %w = unshard(%s)
    %y = cond(%p, true, false, (%x, %s))   ->    true: mm(%x, %w)
                                                 %y = cond(%p, true, false, (%x, %w))

Eager FSDP2 gathers a unit before its module runs, whatever is done inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from graphshard.compat.inductor import copy_graph, module_like
from graphshard.errors import UnsupportedModel
from graphshard.graph.extensions import EXTENDED
from graphshard.graph.ir import PassContext, is_call
from graphshard.graph.markers import UNSHARD

# Operators that run inner graphs on the tuples among their arguments, one behind the other; the last one has what the
# inner graphs use besides.
CONTROL_FLOW = ("cond", "while_loop", "map_impl", "scan", "associative_scan")


@dataclass(frozen=True)
class HoistEdit:
    """(call, what is read in each of its inner graphs, by their attributes) of calls of control flow."""

    calls: tuple[tuple[str, tuple[tuple[str, tuple[str, ...]], ...]], ...]

    def __bool__(self) -> bool:
        return bool(self.calls)


def decide(graph: Graph, ctx: PassContext) -> HoistEdit:
    """Everything that is read in control flow moves out of it.

    Raises:
        UnsupportedModel: what is read cannot move.
    """
    calls = []
    for call in dict.fromkeys(user for node in graph.find_nodes(op="get_attr") for user in node.users):
        if _is_control_flow(call):
            found = {name: tuple(read.name for read in _reads(inner)) for name, inner in _inner_graphs(call)}
            if any(found.values()):
                calls.append((call.name, tuple(found.items())))
    return HoistEdit(tuple(calls))


def apply(graph: Graph, edit: HoistEdit) -> None:
    """Gives each call what its inner graphs read."""
    by_name = {node.name: node for node in graph.nodes}
    for name, found in edit.calls:
        _hoist(graph, by_name[name], dict(found))


def _is_control_flow(node: Node) -> bool:
    name = getattr(node.target, "__name__", "")
    return name in CONTROL_FLOW and node.target is getattr(torch.ops.higher_order, name, None)


def _inner_graphs(call: Node) -> Iterator[tuple[str, GraphModule]]:
    owner = call.graph.owning_module
    for argument in call.args:
        if isinstance(argument, Node) and argument.op == "get_attr":
            inner = getattr(owner, str(argument.target))
            if isinstance(inner, GraphModule):
                yield str(argument.target), inner


def _reads(inner: GraphModule) -> list[Node]:
    """In graph order.

    Raises:
        UnsupportedModel: one cannot move.
    """
    known = {*inner.graph.find_nodes(op="placeholder")}
    reads = [node for node in inner.graph.nodes if _is_read(node)]
    stuck = any(_is_read(node) for part in _inside(inner) for node in part.graph.nodes)
    for node in reads:
        stuck |= not known.issuperset(node.all_input_nodes)
        known.add(node)
    if stuck:
        raise UnsupportedModel(
            "a parameter is read in an inner graph of a torch.cond, or of a loop of torch's: whether that runs may "
            "differ from rank to rank, and the read cannot move in front of it; want no checkpoint there"
        )
    return reads


def _is_read(node: Node) -> bool:
    return is_call(node, UNSHARD) or is_call(node, EXTENDED)


def _inside(inner: GraphModule) -> Iterator[GraphModule]:
    return (part for part in inner.modules() if part is not inner and isinstance(part, GraphModule))


def _hoist(graph: Graph, call: Node, found: dict[str, tuple[str, ...]]) -> None:
    owner: Any = graph.owning_module
    given = [value for argument in call.args if isinstance(argument, (tuple, list)) for value in argument]
    inner_of = {name: copy_graph(getattr(owner, name)) for name in found}
    hoisted: dict[str, Node] = {}
    read_as: dict[str, dict[Node, Node]] = {}
    for name, reads in found.items():
        by_name = {node.name: node for node in inner_of[name].nodes}
        outer = dict(zip(inner_of[name].find_nodes(op="placeholder"), given, strict=True))
        for read in (by_name[read] for read in reads):
            args, kwargs = map_arg((read.args, read.kwargs), outer.__getitem__)
            if (key := f"{read.target} {args} {kwargs}") not in hoisted:
                with graph.inserting_before(call):
                    hoisted[key] = graph.call_function(read.target, args, kwargs)
                hoisted[key].meta = dict(read.meta)
            outer[read] = hoisted[key]
        read_as[name] = {by_name[read]: outer[by_name[read]] for read in reads}
    for name, inner in inner_of.items():
        _take(inner, [*hoisted.values()], read_as[name])
    operands = (*call.args[-1], *hoisted.values())  # type: ignore[misc]
    first = len(given) + len(hoisted) - len(operands)
    needed = _needed([inner.find_nodes(op="placeholder")[first:] for inner in inner_of.values()])
    kept = tuple(value for value, is_needed in zip(operands, needed, strict=True) if is_needed)
    call.args = (*call.args[:-1], kept)
    for name, inner in inner_of.items():
        _put_in_place(graph, call, name, module_like(getattr(owner, name), inner))


def _take(inner: Graph, hoisted: list[Node], read_as: dict[Node, Node]) -> None:
    """Arguments for what was hoisted, in the place of reads."""
    places = inner.find_nodes(op="placeholder")
    place_of: dict[Node, Node] = {}
    with inner.inserting_before(next(node for node in inner.nodes if node.op != "placeholder")):
        for number, node in enumerate(hoisted, start=len(places)):
            place_of[node] = inner.placeholder(f"read_{number}")
            place_of[node].meta = dict(node.meta)
    for read, node in reversed(read_as.items()):
        read.replace_all_uses_with(place_of[node])
        inner.erase_node(read)


def _needed(places: list[list[Node]]) -> list[bool]:
    """Which of the last arguments of inner graphs one of them uses; takes the others out of all."""
    needed = [any(place.users for place in of_one) for of_one in zip(*places, strict=True)]
    for of_graph in places:
        for place, is_needed in zip(of_graph, needed, strict=True):
            if not is_needed:
                place.graph.erase_node(place)
    return needed


def _put_in_place(graph: Graph, call: Node, name: str, inner: GraphModule) -> None:
    owner: Any = graph.owning_module
    number = next(number for number in count() if not hasattr(owner, f"{name}_{number}"))
    owner.add_submodule(f"{name}_{number}", inner)
    (old,) = (node for node in call.all_input_nodes if node.op == "get_attr" and node.target == name)
    with graph.inserting_before(call):
        new = graph.get_attr(f"{name}_{number}")
    new.meta = dict(old.meta)
    call.replace_input_with(old, new)
    if not old.users:
        graph.erase_node(old)
    if not graph.find_nodes(op="get_attr", target=name):
        owner.delete_submodule(name)
