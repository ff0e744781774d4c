"""Every invariant rejects a graph that breaks it, names the culprit, and accepts the graph that does not."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import pytest
import torch
from torch.fx import Graph, Node

from graphshard import verify
from graphshard.errors import VerifyError
from graphshard.ir import REDUCE_SCATTER, WAIT, Builder, aten, launches, output_node, replace, val
from graphshard.markers import REDUCE_GRAD, UNSHARD
from tests.graph.graphs import (
    BF16,
    F16,
    F32,
    GraphBuilder,
    Marked,
    Weight,
    lowered_until,
    toy_backward,
    toy_forward,
    toy_weights,
    two_gathers,
    two_reductions,
)

Break = Callable[[Marked], None]


def marked_forward() -> Marked:
    return toy_forward(toy_weights())


def lowered_forward() -> Marked:
    return lowered_until(marked_forward())


def lowered_backward() -> Marked:
    return lowered_until(toy_backward(toy_weights()))


def assert_rejects(invariant: str, check: Callable[[], None], *named: str) -> None:
    """The check fails with this invariant, and the message names each of `named`."""
    with pytest.raises(VerifyError) as caught:
        check()
    assert caught.value.invariant == invariant
    message = str(caught.value)
    assert message.startswith(f"[{invariant}] ")
    for name in named:
        assert name in message


# -- G: the graph itself


def test_g1_rejects_a_use_before_its_definition() -> None:
    marked = marked_forward()
    verify.check_lint(marked.graph)
    first, last = marked.node("t_default"), marked.node("mm_default")
    last.append(first)
    assert_rejects("G1", lambda: verify.check_lint(marked.graph), "addmm_default", "t_default")


def test_g1_rejects_a_node_of_another_graph() -> None:
    marked, other = marked_forward(), marked_forward()
    marked.node("relu_default").update_arg(0, other.node("addmm_default"))
    assert_rejects("G1", lambda: verify.check_lint(marked.graph), "addmm_default")


@pytest.mark.parametrize("name", ["x", "relu_default", "unshard_default"])
def test_g2_rejects_a_value_without_a_fake_value(name: str) -> None:
    marked = marked_forward()
    verify.check_values(marked.graph, recompute=False)
    del marked.node(name).meta["val"]
    assert_rejects("G2", lambda: verify.check_values(marked.graph, recompute=False), f"> %{name} = ")


def _retyped(node: Node, size: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...]) -> None:
    with val(node).fake_mode:
        node.meta["val"] = torch.empty_strided(size, strides, dtype=dtype)


@pytest.mark.parametrize(
    ("size", "dtype", "strides"),
    [((6, 5), F32, (5, 1)), ((6, 6), BF16, (6, 1)), ((6, 6), F32, (1, 6))],
    ids=["shape", "dtype", "strides"],
)
def test_g3_rejects_a_stale_fake_value(size: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...]) -> None:
    marked = marked_forward()
    verify.check_values(marked.graph, recompute=True)
    _retyped(marked.node("unshard_default"), size, dtype, strides)
    verify.check_values(marked.graph, recompute=False)
    assert_rejects("G3", lambda: verify.check_values(marked.graph, recompute=True), "> %unshard_default = ")


def test_g3_rejects_a_stale_fake_value_of_a_copy() -> None:
    lowered = lowered_forward()
    verify.check_values(lowered.graph, recompute=True)
    _retyped(lowered.node("cat_default"), (20,), F32, (1,))
    assert_rejects("G3", lambda: verify.check_values(lowered.graph, recompute=True), "> %cat_default = ", "f32[21]")


def test_g3_rejects_a_stale_fake_value_of_a_split() -> None:
    lowered = lowered_forward()
    split = lowered.node("split_with_sizes_default")
    split.meta["val"] = tuple(reversed(val(split)))
    check = lambda: verify.check_values(lowered.graph, recompute=True)  # noqa: E731
    assert_rejects("G3", check, "> %split_with_sizes_default = ")


def test_g3_rejects_a_replacement_of_another_layout() -> None:
    marked = marked_forward()
    old, bias = marked.node("unshard_default"), marked.node("unshard_default_1")
    with pytest.raises(VerifyError, match=r"^\[G3\] %unshard_default_1 replaces %unshard_default: "):
        replace(old, bias)
    replace(old, marked.node("unshard_default_2"))
    assert not old.users


def _add_input(marked: Marked) -> None:
    with marked.graph.inserting_after(marked.node("head_shard")):
        marked.graph.placeholder("late")


def _drop_result(marked: Marked) -> None:
    output = output_node(marked.graph)
    output.args = (output.args[0][:-1],)  # type: ignore[index]


@pytest.mark.parametrize("damage", [_add_input, _drop_result])
def test_g4_rejects_a_changed_signature(damage: Break) -> None:
    marked = marked_forward()
    before = verify.signature(marked.graph)
    verify.check_signature(marked.graph, before)
    damage(marked)
    assert_rejects("G4", lambda: verify.check_signature(marked.graph, before), "head_shard")


# -- C: collectives


def test_c1_rejects_two_waits() -> None:
    lowered = lowered_backward()
    verify.check_waits(lowered.graph)
    wait = lowered.calls(WAIT)[0]
    launch = wait.all_input_nodes[0]
    Builder(lowered.graph, wait).call(WAIT, launch)
    assert_rejects("C1", lambda: verify.check_waits(lowered.graph), f"%{launch.name}: got 2 waits")


def test_c1_rejects_a_launch_without_a_wait() -> None:
    lowered = lowered_backward()
    wait = next(wait for wait in lowered.calls(WAIT) if wait.all_input_nodes[0].target is REDUCE_SCATTER)
    launch = wait.all_input_nodes[0]
    wait.update_arg(0, lowered.node("head_shard"))
    assert_rejects("C1", lambda: verify.check_waits(lowered.graph), f"%{launch.name}: got 0 waits")


def test_c2_rejects_a_read_before_the_wait() -> None:
    lowered = lowered_forward()
    verify.check_hazards(lowered.graph)
    wait = lowered.calls(WAIT)[0]
    reader = Builder(lowered.graph, wait).call(aten.neg.default, wait.all_input_nodes[0])
    assert_rejects("C2", lambda: verify.check_hazards(lowered.graph), f"%{reader.name}: reads")


def _before(anchor: Node, target: Callable[..., object], *args: object, **kwargs: object) -> Node:
    with anchor.graph.inserting_before(anchor):
        return anchor.graph.call_function(target, args, kwargs)  # type: ignore[arg-type]


def _copy_into_input(build: Builder, source: Node) -> Node:
    return build.call(aten.copy_.default, source, source)


def _write_through_view(build: Builder, source: Node) -> Node:
    return build.call(aten.zero_.default, build.call(aten.slice.Tensor, source, 0, 0, 1))


def _write_as_out(build: Builder, source: Node) -> Node:
    return _before(build.anchor, aten.neg.out, source, out=source)


def _write_in_a_list(build: Builder, source: Node) -> Node:
    return _before(build.anchor, aten._foreach_zero_.default, [source])


_WRITES = [_copy_into_input, _write_through_view, _write_as_out, _write_in_a_list]


@pytest.mark.parametrize("write", _WRITES)
def test_c2_rejects_a_write_to_an_input_before_the_wait(write: Callable[[Builder, Node], Node]) -> None:
    lowered = lowered_forward()
    wait = lowered.calls(WAIT)[1]  # ordered: the launch stands well before
    launch = wait.all_input_nodes[0]
    writer = write(Builder(lowered.graph, wait), launch.all_input_nodes[0])
    assert_rejects("C2", lambda: verify.check_hazards(lowered.graph), f"%{writer.name}: writes", f"%{launch.name}")


def test_c2_rejects_a_write_to_what_an_input_is_a_view_of() -> None:
    lowered = lowered_backward()
    launch = launches(lowered.graph)[1]
    flat = launch.all_input_nodes[0]
    assert flat.target is aten.reshape.default
    base = flat.all_input_nodes[0].all_input_nodes[0]
    with lowered.graph.inserting_after(launch):
        writer = lowered.graph.call_function(aten.zero_.default, (base,))
    assert_rejects("C2", lambda: verify.check_hazards(lowered.graph), f"%{writer.name}: writes")


@pytest.mark.parametrize("write", _WRITES)
def test_c2_accepts_a_write_after_the_wait_or_before_the_launch(write: Callable[[Builder, Node], Node]) -> None:
    lowered = lowered_forward()
    launch = launches(lowered.graph)[1]
    source, wait = launch.all_input_nodes[0], next(iter(launch.users))
    write(Builder(lowered.graph, launch), source)
    write(Builder(lowered.graph, wait.next), source)
    verify.check_hazards(lowered.graph)


def test_c3_rejects_a_lost_gather() -> None:
    marked = marked_forward()
    before = verify.traffic(marked.graph, marked.ctx)
    verify.check_traffic(marked.graph, marked.ctx, before)
    bias = marked.node("unshard_default_3")
    bias.replace_all_uses_with(marked.node("unshard_default_1"))
    marked.graph.erase_node(bias)
    check = lambda: verify.check_traffic(marked.graph, marked.ctx, before)  # noqa: E731
    assert_rejects("C3", check, "blocks.1.bias: all_gather got None")


def test_c3_rejects_a_gather_made_twice() -> None:
    marked = lowered_forward()
    before = verify.traffic(marked.graph, marked.ctx)
    launch = launches(marked.graph)[0]
    again = Builder(marked.graph, launch).call(launch.target, *launch.args)  # type: ignore[arg-type]
    again.meta["collective"] = launch.meta["collective"]
    check = lambda: verify.check_traffic(marked.graph, marked.ctx, before)  # noqa: E731
    assert_rejects("C3", check, "blocks.0.bias: all_gather")


def test_c3_rejects_another_dtype_on_the_wire() -> None:
    weight = Weight("block.weight", (4, 3), reduce_dtype=BF16)
    marked = two_reductions(weight)
    before = verify.traffic(marked.graph, marked.ctx)
    (marker,) = marked.calls(REDUCE_GRAD)
    marker.update_arg(2, str(Weight("block.weight", (4, 3)).spec))
    check = lambda: verify.check_traffic(marked.graph, marked.ctx, before)  # noqa: E731
    assert_rejects("C3", check, "block.weight: reduce_scatter", "bfloat16", "float32")


def test_c3_counts_markers_and_launches_alike() -> None:
    for marked in (marked_forward(), toy_backward(toy_weights(world_size=3))):
        before = verify.traffic(marked.graph, marked.ctx)
        assert before
        lowered = lowered_until(marked)
        verify.check_traffic(lowered.graph, lowered.ctx, before)


# -- B: buckets


@pytest.mark.parametrize(
    "other",
    [
        Weight("block.b", (4,), 1, group="1"),
        Weight("block.b", (4,), 1, world_size=4),
        Weight("block.b", (4,), 1, param_dtype=BF16),
        Weight("block.b", (4,), 1, dtype=BF16, param_dtype=F32),
        Weight("block.b", (4,), 1, reduce_dtype=F16),
        Weight("block.b", (4,), 1, reshard=False),
    ],
    ids=["group", "world size", "param dtype", "stored dtype", "reduce dtype", "reshard policy"],
)
def test_b1_rejects_a_bucket_of_unlike_members(other: Weight) -> None:
    marked = two_gathers(Weight("block.a", (4,)), Weight("block.c", (2, 4), 2), other)
    like, also_like, unlike = marked.calls(UNSHARD)
    like.meta["bucket"], also_like.meta["bucket"] = ("gather:block", 0), ("gather:block", 1)
    verify.check_buckets(marked.graph, marked.ctx)
    unlike.meta["bucket"] = ("gather:block", 2)
    check = lambda: verify.check_buckets(marked.graph, marked.ctx)  # noqa: E731
    assert_rejects("B1", check, f"%{unlike.name}: bucket 'gather:block'", f"%{like.name}")


def test_b1_rejects_a_gather_and_a_reduction_in_one_bucket() -> None:
    marked = toy_backward(toy_weights())
    gather, reduction = marked.calls(UNSHARD)[0], marked.calls(REDUCE_GRAD)[1]
    gather.meta["bucket"] = reduction.meta["bucket"] = ("mixed", 0)
    assert_rejects("B1", lambda: verify.check_buckets(marked.graph, marked.ctx), "'mixed'", reduction.name)


# -- S: scheduling


def dropout_graph() -> Marked:
    build = GraphBuilder()
    x = build.input("x", [4])
    first = build.call(aten.bernoulli.p, x, 0.5)
    second = build.call(aten.rand_like.default, x)
    return build.finish(build.call(aten.add.Tensor, first, second))


def _check_permutation(marked: Marked) -> Callable[[], None]:
    names, random = [node.name for node in marked.graph.nodes], verify.random_operators(marked.graph)
    return lambda: verify.check_permutation(marked.graph, names, random)


def _add_node(graph: Graph) -> None:
    output = output_node(graph)
    Builder(graph, output).call(aten.neg.default, output.all_input_nodes[0])


def _remove_node(graph: Graph) -> None:
    total = output_node(graph).all_input_nodes[0]
    total.replace_all_uses_with(total.all_input_nodes[0])
    graph.erase_node(total)


@pytest.mark.parametrize("damage", [_add_node, _remove_node])
def test_s1_rejects_nodes_added_or_removed(damage: Callable[[Graph], None]) -> None:
    marked = dropout_graph()
    check = _check_permutation(marked)
    check()
    before = {node.name for node in marked.graph.nodes}
    damage(marked.graph)
    changed = before.symmetric_difference(node.name for node in marked.graph.nodes)
    assert_rejects("S1", check, *changed)


def test_s1_rejects_random_operators_in_another_order() -> None:
    marked = dropout_graph()
    check = _check_permutation(marked)
    first, second = marked.node("bernoulli_p"), marked.node("rand_like_default")
    second.append(first)
    assert_rejects("S1", check, "got ['rand_like_default', 'bernoulli_p']")


def test_s1_accepts_a_permutation_around_random_operators() -> None:
    build = GraphBuilder()
    x = build.input("x", [4])
    kept = build.call(aten.neg.default, x)
    marked = build.finish(build.call(aten.bernoulli.p, x, 0.5), kept)
    check = _check_permutation(marked)
    marked.node("bernoulli_p").append(kept)
    check()


# -- L: lifetime


@pytest.mark.parametrize("through", [(), (aten.t.default,), (aten.t.default, aten.alias.default)])
def test_l1_rejects_a_gathered_parameter_kept_for_backward(through: tuple[Callable[..., object], ...]) -> None:
    build = GraphBuilder()
    weight = Weight("block.weight", (4, 4))
    x, gathered = build.input("x", [2, 4]), build.unshard(weight)
    saved = gathered
    for view in through:
        saved = build.call(view, saved)
    marked = build.finish(build.call(aten.mm.default, x, gathered), x, saved)
    assert_rejects("L1", lambda: verify.check_reshard(marked.graph, 1), f"%{gathered.name}: is kept for backward")
    verify.check_reshard(marked.graph, 3)  # the same value, when it is a result that the user asked for


@pytest.mark.parametrize("weight", [Weight("w", (4,), reshard=False), Weight("w", (4,), world_size=1)])
def test_l1_accepts_what_stays_gathered(weight: Weight) -> None:
    build = GraphBuilder()
    gathered = build.unshard(weight)
    verify.check_reshard(build.finish(build.call(aten.neg.default, gathered), gathered).graph, 1)


# -- R: reductions

TOY_FQNS = frozenset(weight.fqn for weight in toy_weights())


@pytest.mark.parametrize("lower", [False, True], ids=["markers", "launches"])
def test_r1_rejects_a_gradient_that_is_not_reduced(lower: bool) -> None:
    marked = toy_backward(toy_weights())
    unreduced = lowered_until(
        marked.flagged(unreduced=frozenset({"blocks_1_bias_shard"})), None if lower else "apply_flags"
    )
    verify.check_reductions(unreduced.graph, marked.ctx, TOY_FQNS - {"blocks.1.bias"})
    check = lambda: verify.check_reductions(unreduced.graph, marked.ctx, TOY_FQNS)  # noqa: E731
    assert_rejects("R1", check, "blocks.1.bias: its gradient is reduced 0 times, want 1")


def test_r1_rejects_a_gradient_reduced_twice() -> None:
    lowered = lowered_backward()
    verify.check_reductions(lowered.graph, lowered.ctx, TOY_FQNS)
    launch = next(node for node in lowered.calls(REDUCE_SCATTER))
    again = Builder(lowered.graph, launch).call(REDUCE_SCATTER, *launch.args)
    again.meta["collective"] = launch.meta["collective"]
    check = lambda: verify.check_reductions(lowered.graph, lowered.ctx, TOY_FQNS)  # noqa: E731
    assert_rejects("R1", check, "head: its gradient is reduced 2 times, want 1")


def test_r1_rejects_a_reduction_that_nobody_asked_for() -> None:
    lowered = lowered_backward()
    check = lambda: verify.check_reductions(lowered.graph, lowered.ctx, TOY_FQNS - {"head"})  # noqa: E731
    assert_rejects("R1", check, "head: its gradient is reduced 1 times, want 0")


# -- D: dtypes


def test_d1_rejects_a_launch_of_another_dtype() -> None:
    lowered = lowered_until(two_gathers(Weight("w", (4, 3), param_dtype=BF16)))
    verify.check_dtypes(lowered.graph)
    (launch,) = launches(lowered.graph)
    launch.update_arg(0, lowered.node("w_shard"))  # without its cast
    _retyped(launch, (12,), F32, (1,))
    assert_rejects("D1", lambda: verify.check_dtypes(lowered.graph), f"%{launch.name}: moves torch.float32")


def test_d1_rejects_a_gradient_that_has_not_its_parameters_dtype() -> None:
    marked = two_reductions(Weight("w", (4, 3), param_dtype=BF16, reduce_dtype=F16))
    verify.check_dtypes(marked.graph)
    (reduction,) = marked.calls(REDUCE_GRAD)
    _retyped(reduction, (6,), F16, (1,))
    assert_rejects("D1", lambda: verify.check_dtypes(marked.graph), f"%{reduction.name}: gradient is torch.float16")


# -- M: markers


def test_m1_rejects_a_marker_that_is_left() -> None:
    verify.check_lowered(lowered_forward().graph)
    verify.check_lowered(lowered_backward().graph)
    assert_rejects("M1", lambda: verify.check_lowered(marked_forward().graph), "> %unshard_default = ")
    reduction = two_reductions(Weight("w", (4,)))
    assert_rejects("M1", lambda: verify.check_lowered(reduction.graph), "> %reduce_grad_default = ")


# -- all of them


def test_invariants_have_a_rejecting_test_each() -> None:
    listed = set(re.findall(r"\b([A-Z]\d)  ", verify.__doc__ or ""))
    assert len(listed) >= 13
    tested = {match[1].upper() for name in globals() if (match := re.match(r"test_([a-z]\d)_rejects_", name))}
    assert tested == listed


def test_invariants_raised_are_those_listed() -> None:
    listed = set(re.findall(r"\b([A-Z]\d)  ", verify.__doc__ or ""))
    assert set(re.findall(r"(?:_fail|VerifyError)\(\s*\"([A-Z]\d)\"", inspect.getsource(verify))) == listed
