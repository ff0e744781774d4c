"""One unshard per parameter and one reduction per gradient, where a parameter is tied or read more than once.

Needs: a graph with markers. Leaves: no two equal unshards; no sum of two reductions of one shard.

    %a = unshard(%s)                    %a = unshard(%s)
    %b = unshard(%s)             ->     %g = add(%ga, %gb)
    %ra = reduce_grad(%ga, %s)          %r = reduce_grad(%g, %s)
    %rb = reduce_grad(%gb, %s)
    %r = add(%ra, %rb)

The sum keeps autograd's order of its terms, so it has the bits of eager FSDP2, which adds into one unsharded gradient.
A checkpoint has an unshard of its own: if what it computes reads a parameter twice, its gradient is a sum already,
whose terms are added one by one to what came before: (a + b) + (c + d) becomes ((a + b) + c) + d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

from torch.fx import Graph, Node

from graphshard.graph.builder import Builder
from graphshard.graph.ir import PassContext, aten, is_call, reductions, unshards
from graphshard.graph.markers import REDUCE_GRAD
from graphshard.graph.sameness import Bitwise, Regrouped, Sameness


@dataclass(frozen=True)
class FoldEdit:
    """What is folded.

    Attributes:
        duplicates: (kept, dropped) unshards.
        sums: additions of two reductions of one shard, sources first.
        inner: additions inside a second term whose terms are added one by one.
    """

    duplicates: tuple[tuple[str, str], ...]
    sums: tuple[str, ...]
    inner: tuple[str, ...] = ()

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

    uses: dict[object, int] = {}
    for node in unshards(graph):
        uses[node.args[0]] = max(len(node.users), uses.get(node.args[0], 0))
    shard_of = {node: node.args[1:] for node in reductions(graph)}
    sums, inner = [], []
    for node in graph.nodes:
        if _is_sum(node):
            left, right = (shard_of.get(term) if isinstance(term, Node) else None for term in node.args)
            if left is not None and left == right and all(len(term.users) == 1 for term in node.all_input_nodes):
                shard_of[node] = left
                sums.append(node.name)
                if node.args[0] is not node.args[1]:
                    inner += _additions(node.args[1], uses.get(left[0], 0) - 1)
    return FoldEdit(tuple(duplicates), tuple(sums), tuple(inner))


def _is_sum(node: object) -> TypeGuard[Node]:
    return is_call(node, aten.add.Tensor) and not node.kwargs and len(node.args) == 2


def _additions(reduction: Any, most: int) -> list[str]:
    """Names of the additions by which autograd made the gradient of `reduction`, the last first; `most`: one fewer than
    there are uses. More are what an operator's own formula adds.
    """
    found: list[str] = []
    node = reduction.args[0] if is_call(reduction, REDUCE_GRAD) else None
    while len(found) < most and _is_sum(node) and len(node.users) == 1:
        found.append(node.name)
        node = node.args[0]
    return found


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
        terms, opened = [right.args[0]], []
        while terms[0].name in edit.inner:
            opened.append(terms[0])
            terms[:1] = terms[0].args
        grad = left.args[0]
        for term in terms:
            grad = build.call(aten.add.Tensor, grad, term)
        folded = build.call(REDUCE_GRAD, grad, *left.args[1:])
        total.replace_all_uses_with(folded)
        for node in dict.fromkeys((total, left, right, *opened)):
            graph.erase_node(node)
        by_name[name] = folded
        # A later sum refers to this one through its argument, which now is `folded`.
