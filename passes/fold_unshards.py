"""One unshard per parameter and one reduction per gradient, where a parameter is tied or read more than once.

Needs: a graph with markers. Leaves: no two equal unshards; no sum of two reductions of one shard.

    %a = unshard(%s)                    %a = unshard(%s)
    %b = unshard(%s)             ->     %g = add(%ga, %gb)
    %ra = reduce_grad(%ga, %s)          %r = reduce_grad(%g, %s)
    %rb = reduce_grad(%gb, %s)
    %r = add(%ra, %rb)

The sum keeps autograd's order of its terms, so it has the bits of eager FSDP2, which adds into one unsharded gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node

from graphshard.graph.builder import Builder
from graphshard.graph.ir import PassContext, aten, is_call, reductions, unshards
from graphshard.graph.markers import REDUCE_GRAD
from graphshard.graph.sameness import Bitwise, Regrouped, Sameness


@dataclass(frozen=True)
class FoldEdit:
    """`duplicates`: (kept, dropped) unshards. `sums`: additions of two reductions of one shard, sources first."""

    duplicates: tuple[tuple[str, str], ...]
    sums: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.duplicates or self.sums)


def keeps(edit: FoldEdit) -> Sameness:
    """Gradients are added up before they are reduced, not behind that."""
    return Regrouped("gradients of one parameter are added before they are reduced") if edit.sums else Bitwise()


def decide(graph: Graph, ctx: PassContext) -> FoldEdit:
    """Finds equal unshards, and additions whose terms are all reductions of one shard."""
    first: dict[str, Node] = {}
    duplicates = []
    for node in unshards(graph):
        kept = first.setdefault(repr(node.args), node)
        if kept is not node:
            duplicates.append((kept.name, node.name))

    shard_of = {node: node.args[1:] for node in reductions(graph)}
    sums = []
    for node in graph.nodes:
        if is_call(node, aten.add.Tensor) and not node.kwargs and len(node.args) == 2:
            left, right = (shard_of.get(term) if isinstance(term, Node) else None for term in node.args)
            if left is not None and left == right and all(len(term.users) == 1 for term in node.all_input_nodes):
                shard_of[node] = left
                sums.append(node.name)
    return FoldEdit(tuple(duplicates), tuple(sums))


def apply(graph: Graph, edit: FoldEdit) -> None:
    """Folds what `edit` names."""
    by_name = {node.name: node for node in graph.nodes}
    for kept, dropped in edit.duplicates:
        by_name[dropped].replace_all_uses_with(by_name[kept])
        graph.erase_node(by_name[dropped])
    for name in edit.sums:
        total = by_name[name]
        left, right = total.args
        build = Builder(graph, total)
        grad = build.call(aten.add.Tensor, left.args[0], right.args[0])
        folded = build.call(REDUCE_GRAD, grad, *left.args[1:])
        total.replace_all_uses_with(folded)
        for node in dict.fromkeys((total, left, right)):
            graph.erase_node(node)
        by_name[name] = folded
        # A later sum refers to this one through its argument, which now is `folded`.
