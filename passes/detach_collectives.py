"""What c10d writes into a tensor brings no gradient: as Dynamo captures it, it would.

Needs: a graph as Dynamo captured it. Leaves: gradients as they are without a trace.

    dist.all_gather_into_tensor(y, x)                   dist.all_reduce(x)
    %g = all_gather_into_tensor(%x)                     %r = all_reduce(%x)
    %w = wait_tensor(%g)                                %w = wait_tensor(%r)
    copy_(%y, %w)         ->  copy_(%y, detach(%w))     copy_(%x, %w)   ->  copy_(detach(%x), detach(%w))

In the place of a collective that writes, Dynamo puts its functional form, which autograd differentiates, and a copy.
c10d's own has no formula: what is gathered is a constant, and the gradient of what is reduced in place passes as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, Node

from graphshard.compat.dynamo import writes_for_c10d
from graphshard.graph.ir import PassContext

_ALL_REDUCE = torch.ops._c10d_functional.all_reduce


@dataclass(frozen=True)
class DetachEdit:
    """Names of the copies that bring no gradient; those into what was reduced leave that one's as it is."""

    copies: tuple[str, ...]
    in_place: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.copies or self.in_place)


def decide(graph: Graph, ctx: PassContext) -> DetachEdit:
    """Finds what Dynamo has put in the place of collectives that write."""
    copies = [node for node in graph.find_nodes(op="call_method", target="copy_") if writes_for_c10d(node)]
    in_place = [node for node in copies if _is_reduced(node)]
    return DetachEdit(
        tuple(node.name for node in copies if node not in in_place), tuple(node.name for node in in_place)
    )


def _is_reduced(copy: Node) -> bool:
    """Whether what it copies comes from an `all_reduce`, through its wait."""
    _, wait = copy.all_input_nodes
    return any(getattr(sent.target, "overloadpacket", sent.target) is _ALL_REDUCE for sent in wait.all_input_nodes)


def apply(graph: Graph, edit: DetachEdit) -> None:
    """Detaches them."""
    by_name = {node.name: node for node in graph.nodes}
    for name in (*edit.copies, *edit.in_place):
        written, source = by_name[name].args
        with graph.inserting_before(by_name[name]):
            by_name[name].args = (_detached(written) if name in edit.in_place else written, _detached(source))


def _detached(value: object) -> Node:
    assert isinstance(value, Node)
    node = value.graph.call_method("detach", (value,))
    node.meta = dict(value.meta)
    if isinstance(example := value.meta.get("example_value"), Tensor):
        node.meta["example_value"] = example.detach()
    return node
