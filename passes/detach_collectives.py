"""What c10d writes into a tensor brings no gradient: as Dynamo captures it, it would.

Needs: a graph as Dynamo captured it. Leaves: gradients as they are without a trace.

    dist.all_gather_into_tensor(y, x)                   dist.all_reduce(x)
    %g = all_gather_into_tensor(%x)                     %r = all_reduce(%x)
    %w = wait_tensor(%g)                                %w = wait_tensor(%r)
    copy_(%y, %w)    ->  copy_(%y.data, %w)          copy_(%x, %w)   ->  copy_(%x.data, %w)

In the place of a collective that writes, Dynamo puts its functional form, which autograd differentiates, and a copy.
c10d's own has no formula, and autograd does not see that it writes: what is gathered is a constant, the gradient of
what is reduced in place passes as it is, and where backward needs that tensor (that of `exp`), it has what was written.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.fx import Graph, Node

from graphshard.compat.dynamo import DATA, writes_for_c10d
from graphshard.graph.ir import PassContext


@dataclass(frozen=True)
class DetachEdit:
    """Names of the copies that autograd is not to see."""

    copies: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.copies)


def decide(graph: Graph, ctx: PassContext) -> DetachEdit:
    """Finds what Dynamo has put in the place of collectives that write."""
    copies = graph.find_nodes(op="call_method", target="copy_")
    return DetachEdit(tuple(node.name for node in copies if writes_for_c10d(node)))


def apply(graph: Graph, edit: DetachEdit) -> None:
    """Takes them from autograd."""
    by_name = {node.name: node for node in graph.nodes}
    for name in edit.copies:
        written, source = by_name[name].all_input_nodes
        with graph.inserting_before(by_name[name]):
            by_name[name].args = (_data(written), source)


def _data(value: Node) -> Node:
    node = value.graph.call_function(DATA, (value,))
    node.meta = dict(value.meta)
    if isinstance(example := value.meta.get("example_value"), Tensor):
        node.meta["example_value"] = example.data
    return node
