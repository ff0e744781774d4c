"""One unshard per parameter, one reduction per gradient, and the order of autograd's sums."""

from __future__ import annotations

import torch
from torch.fx import Node

from graphshard.graph.ir import aten, output_args
from graphshard.graph.markers import REDUCE_GRAD, UNSHARD
from graphshard.graph.printer import format_graph
from graphshard.passes import fold_unshards
from graphshard.passes.fold_unshards import FoldEdit
from tests.graph.graphs import BF16, GraphBuilder, Marked, Weight, trace, two_gathers

WEIGHT = Weight("embedding", (4, 3))


def folded(marked: Marked) -> FoldEdit:
    edit = fold_unshards.decide(marked.graph, marked.ctx)
    fold_unshards.apply(marked.graph, edit)
    marked.graph.lint()
    assert not fold_unshards.decide(marked.graph, marked.ctx)
    return edit


def reductions_of(count: int, weight: Weight = WEIGHT) -> tuple[GraphBuilder, list[Node]]:
    """`count` reductions of one shard, of gradients `tangents_1`, `tangents_2`, ..."""
    build = GraphBuilder("backward")
    build.shard(weight)
    tangents = [build.input(f"tangents_{i}", weight.size, weight.spec.dtype) for i in range(1, count + 1)]
    return build, [build.reduce(tangent, weight) for tangent in tangents]


def terms(node: Node) -> object:
    """A sum as nested tuples of the names of its terms."""
    return (terms(node.args[0]), terms(node.args[1])) if node.target is aten.add.Tensor else node.name  # type: ignore[arg-type]


def folded_sum(marked: Marked) -> object:
    """The terms of the one gradient that is reduced."""
    (reduction,) = marked.calls(REDUCE_GRAD)
    assert output_args(marked.graph) == [reduction]
    return terms(reduction.args[0])  # type: ignore[arg-type]


def test_fold_keeps_the_first_of_equal_unshards() -> None:
    marked = two_gathers(WEIGHT, Weight("other", (2,)), WEIGHT, WEIGHT)
    edit = folded(marked)
    first, other = marked.calls(UNSHARD)
    assert edit == FoldEdit(((first.name, "unshard_default_2"), (first.name, "unshard_default_3")), ())
    assert [copy.args[0] for copy in marked.calls(aten.clone.default)] == [first, other, first, first]


def test_fold_leaves_unshards_of_unlike_specs() -> None:
    as_bf16 = Weight("embedding", (4, 3), param_dtype=BF16)
    assert not folded(two_gathers(WEIGHT, as_bf16))


def test_fold_makes_two_reductions_one() -> None:
    build, (first, second) = reductions_of(2)
    marked = build.finish(build.call(aten.add.Tensor, first, second))
    assert folded(marked) == FoldEdit((), ("add_tensor",))
    assert folded_sum(marked) == ("tangents_1", "tangents_2")
    (reduction,) = marked.calls(REDUCE_GRAD)
    assert reduction.args[1:] == (marked.node(WEIGHT.shard_name), str(WEIGHT.spec))


def test_fold_keeps_the_order_of_two_terms() -> None:
    build, (first, second) = reductions_of(2)
    marked = build.finish(build.call(aten.add.Tensor, second, first))
    folded(marked)
    assert folded_sum(marked) == ("tangents_2", "tangents_1")


def test_fold_keeps_the_order_of_three_terms() -> None:
    build, (first, second, third) = reductions_of(3)
    total = build.call(aten.add.Tensor, build.call(aten.add.Tensor, first, second), third)
    marked = build.finish(total)
    assert len(folded(marked).sums) == 2
    assert folded_sum(marked) == (("tangents_1", "tangents_2"), "tangents_3")


def test_fold_keeps_a_sum_that_grows_to_the_left() -> None:
    build, (first, second, third) = reductions_of(3)
    total = build.call(aten.add.Tensor, third, build.call(aten.add.Tensor, second, first))
    marked = build.finish(total)
    folded(marked)
    assert folded_sum(marked) == ("tangents_3", ("tangents_2", "tangents_1"))


def test_fold_sums_in_the_dtype_of_the_gradients() -> None:
    build, (first, second) = reductions_of(2, Weight("embedding", (4, 3), param_dtype=BF16, reduce_dtype=torch.float32))
    marked = build.finish(build.call(aten.add.Tensor, first, second))
    folded(marked)
    assert [node.meta["val"].dtype for node in marked.calls(aten.add.Tensor)] == [BF16]


def test_fold_doubles_a_gradient_that_is_added_to_itself() -> None:
    build, (only,) = reductions_of(1)
    marked = build.finish(build.call(aten.add.Tensor, only, only))
    folded(marked)
    assert folded_sum(marked) == ("tangents_1", "tangents_1")


def test_fold_leaves_sums_that_are_not_of_one_gradient() -> None:
    build, (first, second, third, fourth) = reductions_of(4)
    other = build.reduce(build.input("tangents_9", [4, 3]), Weight("other", (4, 3)))
    marked = build.finish(
        build.call(aten.add.Tensor, first, other),  # of two parameters
        build.call(aten.add.Tensor, second, build.input("x", [6])),  # of a gradient and something else
        build.call(aten.add.Tensor, third, fourth, alpha=2),  # with a factor
        build.call(aten.sub.Tensor, third, fourth),
    )
    before = format_graph(marked.graph)
    assert not folded(marked)
    assert format_graph(marked.graph) == before


def test_fold_leaves_a_sum_whose_term_is_used_elsewhere() -> None:
    build, (first, second) = reductions_of(2)
    marked = build.finish(build.call(aten.add.Tensor, first, second), first)
    assert not folded(marked)


def test_fold_makes_one_gather_and_one_reduction_of_a_parameter_read_three_times() -> None:
    def tied(read, ids):  # type: ignore[no-untyped-def]
        hidden = torch.nn.functional.embedding(ids, read(0))
        logits = torch.tanh(hidden) @ read(0).t()
        return torch.softmax(logits, -1) @ read(0)

    traced = trace(tied, [WEIGHT], [torch.tensor([0, 3, 1])], lambda joint: None)
    joint = Marked(traced.joint, traced.forward.ctx)
    assert len(joint.calls(UNSHARD)) == len(joint.calls(REDUCE_GRAD)) == 3
    edit = folded(joint)
    assert (len(edit.duplicates), len(edit.sums)) == (2, 2)
    assert len(joint.calls(UNSHARD)) == len(joint.calls(REDUCE_GRAD)) == 1


def test_fold_adds_the_terms_of_a_second_sum_one_by_one() -> None:
    build = GraphBuilder("joint")
    build.shard(WEIGHT)
    a, b, c, d = (build.input(f"tangents_{i}", WEIGHT.size, WEIGHT.spec.dtype) for i in range(1, 5))
    full = build.unshard(WEIGHT)
    used = build.call(aten.add.Tensor, build.call(aten.exp.default, full), build.call(aten.sin.default, full))
    sums = [build.reduce(build.call(aten.add.Tensor, *terms_), WEIGHT) for terms_ in ((a, b), (c, d))]
    marked = build.finish(used, build.call(aten.add.Tensor, *sums))
    assert len(folded(marked).inner) == 1
    (reduction,) = marked.calls(REDUCE_GRAD)
    assert terms(reduction.args[0]) == ((("tangents_1", "tangents_2"), "tangents_3"), "tangents_4")  # type: ignore[arg-type]
