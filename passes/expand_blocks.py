"""Puts the nodes of each block in the place of the calls that stood for it while its surroundings were traced.

Needs: a joint graph or one for inference, from a graph that went through `collapse_blocks`. Leaves: the graph that
tracing without calls would have made.

    %h = block([%x, %w], "body#0")              %u = mm(%x, %w);  %h = relu(%u)
    %g = block_backward([%t], "body#0")   ->    %v = threshold_backward(%t, %h);  %g = mm(%v, ...)

Source: inlining, the inverse of outlining.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.multiprocessing.reductions import StorageWeakRef

from graphshard.compat.partitioner import is_backward, move_checkpoints, number_checkpoints
from graphshard.compat.tensors import fake_copy, no_fake_mode
from graphshard.graph.block_calls import BLOCK, BLOCK_BACKWARD, PASS_ON, body_of
from graphshard.graph.ir import PassContext, is_call, is_tangent, output_args


@dataclass(frozen=True)
class ExpandEdit:
    """Names of the calls, in graph order."""

    calls: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.calls)


def decide(graph: Graph, ctx: PassContext) -> ExpandEdit:
    """Every call is expanded."""
    return ExpandEdit(tuple(node.name for node in graph.nodes if _is_block(node)))


def apply(graph: Graph, edit: ExpandEdit) -> None:
    """Copies the nodes of bodies, with fake values of their own."""
    by_name = {node.name: node for node in graph.nodes}
    expansions: dict[str, _Expansion] = {}
    for number, name in enumerate(edit.calls):
        node = by_name[name]
        arguments, call = node.args
        if is_call(node, BLOCK):
            expansions[call] = _Expansion(graph, call, number)
            results = expansions[call].forward(node, arguments)
        else:
            results = expansions[call].backward(node, arguments)
        _replace_results(graph, node, results)
    for node in graph.nodes:
        if is_call(node, PASS_ON):
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
    number_checkpoints(graph)


def _is_block(node: Node) -> bool:
    return is_call(node, BLOCK) or is_call(node, BLOCK_BACKWARD)


def _replace_results(graph: Graph, node: Node, results: Sequence[Node]) -> None:
    for user in list(node.users):
        place = user.args[1]
        assert is_call(user, operator.getitem) and isinstance(place, int), user
        user.replace_all_uses_with(results[place])
        graph.erase_node(user)
    graph.erase_node(node)


class _Expansion:
    """The nodes of one block: of its forward, then of its backward."""

    def __init__(self, graph: Graph, call: str, number: int) -> None:
        body = body_of(call)
        self._graph = graph
        self._gm = body.gm
        self._body = call.partition("#")[0]
        self._num_outputs = len(body.outputs)
        self._number = number
        self._copies: dict[Node, Node] = {}
        self._values = _Values()
        arguments = [node for node in body.gm.graph.nodes if node.op == "placeholder"]
        self._tangents = [node for node in arguments if is_tangent(node)]
        self._inputs = [node for node in arguments if not is_tangent(node)]
        self._later = _of_backward(body.gm.graph, self._tangents)

    def forward(self, before: Node, arguments: Sequence[Node]) -> list[Node]:
        """Nodes of the outputs."""
        self._bind(self._inputs, arguments)
        self._copy(before, False)
        return [self._copies[node] for node in output_args(self._gm.graph)[: self._num_outputs]]

    def backward(self, before: Node, arguments: Sequence[Node]) -> list[Node]:
        """Nodes of the gradients that there are."""
        self._bind(self._tangents, arguments)
        self._copy(before, True)
        grads = output_args(self._gm.graph)[self._num_outputs :]
        return [self._copies[node] for node in grads if node is not None]

    def _bind(self, placeholders: Sequence[Node], arguments: Sequence[Node]) -> None:
        for placeholder, argument in zip(placeholders, arguments, strict=True):
            self._copies[placeholder] = argument
            self._values.bind(placeholder.meta["val"], argument.meta["val"])

    def _copy(self, before: Node, later: bool) -> None:
        with self._graph.inserting_before(before), no_fake_mode():
            for node in self._gm.graph.nodes:
                if node.op in ("placeholder", "output") or (node in self._later) != later:
                    continue
                copy = self._copies[node] = self._graph.node_copy(node, self._copies.__getitem__)
                copy.meta = dict(node.meta)
                move_checkpoints([copy], self._number)
                if "val" in node.meta:
                    copy.meta["val"] = self._values.copied(node.meta["val"])
                if node.op == "get_attr":
                    self._take_attribute(copy)

    def _take_attribute(self, node: Node) -> None:
        """A constant or an inner graph of the body becomes the graph's."""
        owner: Any = self._graph.owning_module
        name = f"{self._body}_{str(node.target).replace('.', '_')}"
        if not hasattr(owner, name):
            setattr(owner, name, attrgetter(str(node.target))(self._gm))
        node.target = name


def _of_backward(graph: Graph, tangents: Sequence[Node]) -> set[Node]:
    found = set(tangents)
    for node in graph.nodes:
        if is_backward(node) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


class _Values:
    """Fake values for copied nodes: what shares memory in the body does so in the copy, and nothing else does."""

    def __init__(self) -> None:
        self._bound: dict[StorageWeakRef, tuple[Tensor, int]] = {}  # and where the body's memory begins in it
        self._own: dict[StorageWeakRef, Tensor] = {}

    def bind(self, body: Tensor, outside: Tensor) -> None:
        """`outside` is in the copy what `body` is in the body."""
        self._bound[_memory_of(body)] = outside, int(outside.storage_offset() - body.storage_offset())

    def copied(self, value: Any) -> Any:
        """The value of a copied node."""
        if isinstance(value, (tuple, list)):
            return type(value)(map(self.copied, value))
        if not isinstance(value, Tensor):
            return value
        memory = _memory_of(value)
        if memory not in self._bound:
            return fake_copy(value, self._own, memory)
        outside, begin = self._bound[memory]
        with value.fake_mode, torch.no_grad():  # type: ignore[attr-defined]
            if outside.dtype != value.dtype:
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            return outside.as_strided(value.shape, value.stride(), value.storage_offset() + begin)


def _memory_of(value: Tensor) -> StorageWeakRef:
    return StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]
