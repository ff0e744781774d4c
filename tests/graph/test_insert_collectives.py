"""What a bucket becomes: cast, copy-in, launch, wait, copy-out."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch.fx import Node

from graphshard.graph import verify
from graphshard.graph.ir import (
    ALL_GATHER,
    LAUNCHES,
    REDUCE_SCATTER,
    WAIT,
    Member,
    aten,
    collective,
    launches,
    may_view,
    val,
)
from graphshard.graph.markers import REDUCE_GRAD, UNSHARD
from graphshard.passes import insert_collectives
from tests.graph.graphs import (
    BF16,
    F16,
    F32,
    GraphBuilder,
    Marked,
    Weight,
    lowered_until,
    result_nodes,
    toy_backward,
    toy_forward,
    toy_weights,
    two_gathers,
    two_reductions,
)

CAST = torch.ops.prims.convert_element_type.default
PAD = aten.constant_pad_nd.default


def inserted(marked: Marked) -> Marked:
    lowered = lowered_until(marked, "insert_collectives")
    verify.check_values(lowered.graph, {})
    verify.check_waits(lowered.graph)
    assert not insert_collectives.decide(lowered.graph, lowered.ctx)
    return lowered


def roles(marked: Marked) -> list[tuple[str, Any]]:
    """(role, target) of every node that the pass has added."""
    return [(node.meta["role"], node.target) for node in marked.graph.nodes if "role" in node.meta]


def only(nodes: list[Node]) -> Node:
    (node,) = nodes
    return node


def test_gather_of_one_even_parameter_is_launch_wait_and_view() -> None:
    lowered = inserted(two_gathers(Weight("w", (4, 3))))
    assert roles(lowered) == [("launch", ALL_GATHER), ("wait", WAIT), ("copy_out", aten.reshape.default)]
    launch = only(launches(lowered.graph))
    assert launch.args == (lowered.node("w_shard"), 2, "0")
    found = collective(launch)
    assert found is not None
    assert (found.kind, found.group, found.world_size, found.dtype, found.op) == ("all_gather", "0", 2, F32, None)
    assert found.members == (Member("w", 0, 6, F32),)


def test_gather_of_several_parameters_is_one_launch() -> None:
    lowered = inserted(two_gathers(Weight("u.b", (5,), 1), Weight("u.a", (4, 3), 0), Weight("u.c", (1, 2), 2)))
    launch = only(launches(lowered.graph))
    assert val(launch).shape == (2 * (6 + 3 + 2),)
    found = collective(launch)
    assert found is not None
    assert found.bucket == "gather:u"
    assert found.members == (Member("u.a", 0, 6, F32), Member("u.b", 6, 3, F32), Member("u.c", 9, 2, F32))
    assert found.shard_numel == 11


def test_gather_stands_where_the_first_parameter_is_used() -> None:
    build = GraphBuilder()
    x = build.call(aten.neg.default, build.input("x", [3]))
    a = build.call(aten.add.Tensor, x, build.unshard(Weight("u.a", (3,), 1)))
    between = build.call(aten.neg.default, a)
    marked = build.finish(build.call(aten.add.Tensor, between, build.unshard(Weight("u.b", (3,), 0))))
    order = [node.name for node in inserted(marked).graph.nodes]
    assert order.index("neg_default") < order.index("all_gather_into_tensor_default") < order.index("add_tensor")


def test_reduction_stands_where_the_last_gradient_is_ready() -> None:
    build = GraphBuilder("backward")
    a, b = Weight("u.a", (4,), 1), Weight("u.b", (4,), 0)
    build.shard(a), build.shard(b)
    tangent = build.input("tangents_1", [4])
    first = build.reduce(build.call(aten.neg.default, tangent), a)
    second = build.reduce(build.call(aten.exp.default, tangent), b)
    last = build.call(aten.sin.default, tangent)
    lowered = inserted(build.finish(first, second, last))
    order = [node.name for node in lowered.graph.nodes]
    assert order.index("exp_default") < order.index("reduce_scatter_tensor_default") < order.index("sin_default")
    found = collective(only(launches(lowered.graph)))
    assert found is not None
    assert [member.fqn for member in found.members] == ["u.b", "u.a"]


@pytest.mark.parametrize(("size", "padding"), [((5, 3), 3), ((1, 3), 3), ((4, 3), 0), ((7,), 1), ((9, 2, 2), 3)])
def test_uneven_dim_0_is_padded_and_cut_off(size: tuple[int, ...], padding: int) -> None:
    weight = Weight("w", size, world_size=4)
    gathered = inserted(two_gathers(weight))
    cuts = gathered.calls(aten.slice.Tensor)
    assert [node.args[1:] for node in cuts] == ([(0, 0, size[0])] if padding else [])
    reduced = inserted(two_reductions(weight))
    pads = reduced.calls(PAD)
    assert [node.args[1] for node in pads] == ([[0, 0] * (len(size) - 1) + [0, padding]] if padding else [])
    assert val(only(launches(reduced.graph))).shape == (weight.shard_numel,)


def test_gather_casts_each_shard_before_the_copy_in() -> None:
    weights = [Weight("u.a", (4, 3), 0, param_dtype=BF16), Weight("u.b", (4,), 1, param_dtype=BF16)]
    lowered = inserted(two_gathers(*weights))
    casts = lowered.calls(CAST)
    assert [node.args for node in casts] == [(lowered.node(weight.shard_name), BF16) for weight in weights]
    launch = only(launches(lowered.graph))
    assert launch.args[0].args[0] == casts  # type: ignore[union-attr]
    assert val(launch).dtype == BF16


def test_reduction_casts_to_the_reduce_dtype_and_back() -> None:
    weight = Weight("w", (4, 3), param_dtype=BF16, reduce_dtype=F32)
    lowered = inserted(two_reductions(weight))
    up = only(lowered.calls(CAST))
    assert up.args == (lowered.node("mul_tensor"), F32)  # and back is no cast
    lowered = inserted(two_reductions(Weight("w", (4, 3), param_dtype=BF16)))
    down = only(lowered.calls(CAST))
    assert down.args == (only(lowered.calls(WAIT)), F32)
    assert val(only(launches(lowered.graph))).dtype == BF16


@pytest.mark.parametrize(
    ("reduce_dtype", "world_size", "op", "divisors"),
    [
        (F32, 4, "avg", []),
        (BF16, 3, "avg", []),
        (F16, 2, "sum", [2.0]),
        (F16, 4, "sum", [2.0, 2.0]),
        (F16, 3, "sum", [2.0, 1.5]),
        (F16, 8, "sum", [4.0, 2.0]),
        (torch.float64, 4, "sum", [2.0, 2.0]),
    ],
)
def test_reduction_averages_as_fsdp2(
    reduce_dtype: torch.dtype, world_size: int, op: str, divisors: list[float]
) -> None:
    lowered = inserted(two_reductions(Weight("w", (8, 3), reduce_dtype=reduce_dtype, world_size=world_size)))
    launch = only(lowered.calls(REDUCE_SCATTER))
    assert launch.args[1:] == (op, world_size, "0")
    found = collective(launch)
    assert found is not None
    assert found.op == op
    assert [node.args[1] for node in lowered.calls(aten.div.Tensor)] == divisors


def test_one_rank_launches_nothing() -> None:
    for marked in (toy_forward(toy_weights(world_size=1)), toy_backward(toy_weights(world_size=1))):
        lowered = lowered_until(marked)
        assert not [node for node in lowered.graph.nodes if node.target in {WAIT, *LAUNCHES, UNSHARD, REDUCE_GRAD}]
        verify.check_values(lowered.graph, {})


def _alone(*views: Any, escapes: bool, **changes: Any) -> Marked:
    build = GraphBuilder()
    full = build.unshard(Weight("w", (4, 3), world_size=1, **changes))
    for view, *args in views:
        full = build.call(view, full, *args)
    return inserted(build.finish(full if escapes else build.call(aten.neg.default, full)))


@pytest.mark.parametrize("views", [(), ((aten.t.default,),), ((aten.t.default,), (aten.select.int, 0, 1))])
def test_one_rank_clones_a_parameter_only_where_it_escapes(views: tuple[Any, ...]) -> None:
    assert len(_alone(*views, escapes=True).calls(aten.clone.default)) == 1
    assert not _alone(*views, escapes=False).calls(aten.clone.default)


def test_one_rank_casts_instead_of_cloning() -> None:
    lowered = _alone(escapes=True, param_dtype=BF16)
    assert len(lowered.calls(CAST)) == 1
    assert not lowered.calls(aten.clone.default)


@pytest.mark.parametrize(
    "view",
    [
        (aten.split.Tensor, 2),
        (aten.unbind.int,),
        (aten.diagonal.default,),
        (aten.view.dtype, torch.int32),
        (aten.squeeze.default,),
        (aten.unfold.default, 0, 2, 1),
    ],
    ids=lambda view: str(view[0]),
)
def test_one_rank_results_share_no_memory_with_a_parameter(view: tuple[Any, ...]) -> None:
    build = GraphBuilder()
    full = build.unshard(Weight("w", (4, 3), world_size=1))
    viewed = build.call(view[0], full, *view[1:])
    if isinstance(val(viewed), (list, tuple)):
        viewed = build.call(operator.getitem, viewed, 0)
    lowered = inserted(build.finish(viewed))
    shard = torch.zeros(12)
    results = lowered.gm(shard)
    addresses = {value.untyped_storage().data_ptr() for value in (shard, *results)}
    assert len(addresses) == 2


@pytest.mark.parametrize("reduce_dtype", [F32, BF16])
def test_one_rank_gradients_share_no_memory(reduce_dtype: torch.dtype) -> None:
    weights = [Weight(f"u{i}.p", (4, 3), world_size=1, reduce_dtype=reduce_dtype) for i in range(2)]
    build = GraphBuilder("backward")
    for weight in weights:
        build.shard(weight)
    tangent = build.input("tangents_1", [4, 3])
    lowered = inserted(build.finish(*(build.reduce(tangent, weight) for weight in weights)))
    values = [torch.zeros(12), torch.zeros(12), torch.ones(4, 3)]
    addresses = {value.untyped_storage().data_ptr() for value in (*values, *lowered.gm(*values))}
    assert len(addresses) == 5


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_have_the_layout_of_their_markers(world_size: int) -> None:
    weights = [
        Weight("u.row", (world_size, 3), 0, world_size),
        Weight("u.bias", (world_size,), 1, world_size),
        Weight("u.short", (1, 2, 2), 2, world_size),
    ]
    build = GraphBuilder()
    lowered = inserted(build.finish(*(build.unshard(weight) for weight in weights)))
    for weight, result in zip(weights, result_nodes(lowered.graph), strict=True):
        assert val(result).shape == weight.size
        assert val(result).is_contiguous()


def test_views_of_a_bucket_are_not_handed_out_as_gathered_parameters() -> None:
    build = GraphBuilder()
    marked = build.finish(*(build.unshard(Weight(f"u.p{i}", (2, 3), i)) for i in range(2)))
    bases = []
    for node in result_nodes(inserted(marked).graph):
        while may_view(node):
            node = node.all_input_nodes[0]
        bases.append(node)
    assert len(set(bases)) == 2


def test_markers_without_a_bucket_get_a_collective_each() -> None:
    marked = two_gathers(Weight("u.a", (4,)), Weight("u.b", (4,), 1))
    edit = insert_collectives.decide(marked.graph, marked.ctx)
    assert [insertion.fqns for insertion in edit.insertions] == [("u.a",), ("u.b",)]
    insert_collectives.apply(marked.graph, edit)
    assert len(launches(marked.graph)) == 2


def test_collectives_of_the_model_stay() -> None:
    build = GraphBuilder()
    x = build.input("x", [4])
    own = build.call(WAIT, build.call(ALL_GATHER, x, 2, "tp"))
    lowered = inserted(build.finish(own, build.call(aten.neg.default, build.unshard(Weight("w", (8,))))))
    first, second = launches(lowered.graph)
    assert collective(first) is None
    assert collective(second) is not None
