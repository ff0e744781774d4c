"""What a forward saves for its backward of inputs, which may be written in between: by itself, or by others.

As in eager, such a write changes nothing of what was copied before, and is autograd's error where it would change a
gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import SymInt, Tensor
from torch.fx import Graph, GraphModule, Node

from graphshard.compat.partitioner import tag_saved
from graphshard.compat.tensors import size_key
from graphshard.graph.builder import Builder
from graphshard.graph.ir import aten, declares_view, is_call, is_tangent, may_view


def save_before_writes(forward: GraphModule, num_outputs: int) -> None:
    """Has a forward save copies of what it saves of inputs that it writes: backward comes behind the writes.

    AOTAutograd's graphs write inputs at their end, by `copy_`, and the partitioner prefers to save inputs: they are
    there anyway. Plain `torch.compile` computes gradients with what was written (seen with torch 2.13).

    Args:
        forward: that the partitioner made; changed in place.
        num_outputs: of its outputs, those that are not saved values.
    """
    graph = forward.graph
    written = {_memory_of(node.args[0]) for node in graph.nodes if is_call(node, aten.copy_.default)}
    if not written:
        return
    output = next(iter(graph.find_nodes(op="output")))
    results: Any = output.args[0]
    kept = list(results)
    for at, saved in enumerate(results[num_outputs:], num_outputs):
        if isinstance(saved, Node) and _memory_of(saved) in written:
            first = next(node for node in graph.nodes if node.op != "placeholder")
            kept[at] = Builder(graph, first if saved.op == "placeholder" else saved.next).call(
                aten.clone.default, saved
            )
    output.args = (type(results)(kept),)
    forward.recompile()


def hide_copies(joint: Graph) -> None:
    """Keeps Inductor's passes on joint graphs from removing copies of inputs: they see no harm in it, since neither is
    an output.
    """
    if any(map(is_tangent, joint.find_nodes(op="placeholder"))):
        for node in _copies(joint):
            node.target = aten._to_copy.default  # noqa: SLF001


def keep_copies(joint: Graph) -> None:
    """Has such copies saved as they are, but in checkpoints: the partitioner would have the backward copy once more."""
    for node in _copies(joint):
        if "recompute" not in node.meta:
            tag_saved(node)


def _copies(joint: Graph) -> Iterator[Node]:
    """Copies of inputs that users make, as of a queue that they write before backward; none is hidden any more."""
    for node in joint.nodes:
        if is_call(node, aten._to_copy.default) and node.kwargs.keys() <= {"memory_format"}:  # noqa: SLF001
            node.target = aten.clone.default
        if is_call(node, aten.clone.default) and _is_input(_memory_of(node.args[0])) and _has_same_strides(node):
            yield node


def _is_input(node: object) -> bool:
    return isinstance(node, Node) and node.op == "placeholder" and not is_tangent(node)


def _has_same_strides(copy: Node) -> bool:
    made, read = copy.meta.get("val"), copy.all_input_nodes[0].meta.get("val")
    return isinstance(made, Tensor) and isinstance(read, Tensor) and made.stride() == read.stride()


def save_inputs_themselves(forward: GraphModule, backward: GraphModule, num_outputs: int) -> None:
    """Has a forward save inputs in the place of views of them, which the backward takes: autograd does not see that the
    memory of a view was written which a compiler has made. Views of sizes that no tensor tells stay.

    Args:
        forward: that the partitioner made; changed in place.
        backward: likewise.
        num_outputs: of the forward's outputs, those that are not saved values.
    """
    output = next(iter(forward.graph.find_nodes(op="output")))
    results: Any = output.args[0]
    given = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    first = next(node for node in backward.graph.nodes if node.op != "placeholder")
    kept, found = list(results[:num_outputs]), dict[Node, Node]()
    for saved in results[num_outputs:]:
        views = _views_of_input(saved)
        numbers = {node for view in views for node in view.all_input_nodes[1:]}
        base = views[0].all_input_nodes[0] if views else saved
        tellers = [node for node in (*given.values(), base) if node.name != saved.name] if numbers else []
        if (
            not views
            or saved.meta.get("saved_tensor_with_no_vc_check")
            or not all(number.name in given or is_told(number, tellers) for number in numbers)
        ):
            kept.append(saved)
            continue
        was = given.pop(saved.name)
        if base.name not in given:
            kept.append(base)
            with backward.graph.inserting_before(was):
                given[base.name] = backward.graph.placeholder(base.name)
            given[base.name].meta.update(base.meta)
        with backward.graph.inserting_before(first):
            taken = given[base.name]
            of = {number: given.get(number.name) or take_size(number, given.values(), found) for number in numbers}
            for view in views:
                taken = backward.graph.node_copy(view, {**of, view.all_input_nodes[0]: taken}.__getitem__)
        was.replace_all_uses_with(taken)
        backward.graph.erase_node(was)
    output.args = (type(results)(kept),)
    for gm in (forward, backward):
        gm.recompile()


def is_told(number: Node, tensors: Iterable[Node]) -> bool:
    """Whether a size is one of tensors', or computed of such ones."""
    key = size_key(number.meta["val"])
    if any(size_key(size) == key for node in tensors for size in _shape(node)):
        return True
    reads = number.all_input_nodes
    of_numbers = bool(reads) and not any(isinstance(node.meta["val"], Tensor) for node in reads)
    return number.op == "call_function" and of_numbers and all(is_told(node, tensors) for node in reads)


def take_size(number: Node, placeholders: Iterable[Node], found: dict[Node, Node]) -> Node:
    """Adds to a graph what computes a size of another one, which its placeholders tell. `found`: what there is."""
    if number not in found:
        graph, key = next(iter(placeholders)).graph, size_key(number.meta["val"])
        dims = ((node, dim, size) for node in placeholders for dim, size in enumerate(_shape(node)))
        if (where := next(((node, dim) for node, dim, size in dims if size_key(size) == key), None)) is None:
            found[number] = graph.node_copy(number, lambda node: take_size(node, placeholders, found))
        else:
            found[number] = graph.call_function(aten.sym_size.int, where)
            found[number].meta["val"] = number.meta["val"]
    return found[number]


def _shape(node: Node) -> Sequence[int | SymInt]:
    value = node.meta.get("val")
    return value.shape if isinstance(value, Tensor) else ()


def _views_of_input(saved: Any) -> list[Node]:
    """The views, each of the one before, that make something saved of an input; empty: it is none."""
    views: list[Node] = []
    while isinstance(saved, Node) and saved.op == "call_function" and declares_view(saved.target):
        views.insert(0, saved)
        saved = saved.args[0]
    return views if _is_input(saved) else []


def _memory_of(node: object) -> object:
    """The node that made the memory in which a node's value is."""
    while isinstance(node, Node) and may_view(node):
        node = node.args[0]
    return node
