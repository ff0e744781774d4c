"""Every invariant rejects a graph that breaks it, names the culprit, and accepts the graph that does not."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch.fx import Graph, Node

from graphshard.errors import VerifyError
from graphshard.fsdp2.settings import UnitSettings
from graphshard.graph import verify
from graphshard.graph.builder import Builder
from graphshard.graph.ir import REDUCE_SCATTER, aten, launches, output_node, val
from graphshard.graph.liveness import peak_bytes
from graphshard.graph.markers import REDUCE_GRAD, UNSHARD
from graphshard.graph.rewriting import Replacements
from tests.graph import test_verify_collectives
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
from tests.graph.rejection import assert_rejects, lowered_backward, lowered_forward

# -- G: the graph itself


def test_g1_rejects_a_use_before_its_definition() -> None:
    marked = toy_forward(toy_weights())
    verify.check_lint(marked.graph)
    first, last = marked.node("t_default"), marked.node("mm_default")
    last.append(first)
    assert_rejects("G1", lambda: verify.check_lint(marked.graph), "addmm_default", "t_default")


def test_g1_rejects_a_node_of_another_graph() -> None:
    marked, other = toy_forward(toy_weights()), toy_forward(toy_weights())
    marked.node("relu_default").update_arg(0, other.node("addmm_default"))
    assert_rejects("G1", lambda: verify.check_lint(marked.graph), "addmm_default")


@pytest.mark.parametrize("name", ["x", "relu_default", "unshard_default"])
def test_g2_rejects_a_value_without_a_fake_value(name: str) -> None:
    marked = toy_forward(toy_weights())
    verify.check_values(marked.graph)
    del marked.node(name).meta["val"]
    assert_rejects("G2", lambda: verify.check_values(marked.graph), f"> %{name} = ")


def _retyped(node: Node, size: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...]) -> None:
    with val(node).fake_mode:
        node.meta["val"] = torch.empty_strided(size, strides, dtype=dtype)


@pytest.mark.parametrize(
    ("size", "dtype", "strides"),
    [((6, 5), F32, (5, 1)), ((6, 6), BF16, (6, 1)), ((6, 6), F32, (1, 6))],
    ids=["shape", "dtype", "strides"],
)
def test_g3_rejects_a_stale_fake_value(size: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...]) -> None:
    marked = toy_forward(toy_weights())
    verify.check_values(marked.graph, {})
    _retyped(marked.node("unshard_default"), size, dtype, strides)
    verify.check_values(marked.graph)
    assert_rejects("G3", lambda: verify.check_values(marked.graph, {}), "> %unshard_default = ")


def test_g3_computes_again_only_what_has_changed_since() -> None:
    marked = two_gathers(Weight("a", (4, 3)), Weight("b", (4, 3)))
    recomputed: verify.Recomputed = {}
    verify.check_values(marked.graph, recomputed)
    first, second = marked.calls(UNSHARD)
    with mock.patch.object(verify, "_check_value") as checked:
        verify.check_values(marked.graph, recomputed)
        assert not checked.called
        first.meta["val"] = torch.empty_like(first.meta["val"])
        verify.check_values(marked.graph, recomputed)
        assert {call.args[1] for call in checked.call_args_list} == {first, *first.users}
        checked.reset_mock()
        next(iter(first.users)).replace_input_with(first, second)
        verify.check_values(marked.graph, recomputed)
        assert checked.call_count == 1


def test_g3_rejects_a_stale_fake_value_of_a_copy() -> None:
    lowered = lowered_forward()
    verify.check_values(lowered.graph, {})
    _retyped(lowered.node("cat_default"), (20,), F32, (1,))
    assert_rejects("G3", lambda: verify.check_values(lowered.graph, {}), "> %cat_default = ", "f32[21]")


def test_g3_rejects_a_stale_fake_value_of_a_split() -> None:
    lowered = lowered_forward()
    split = lowered.node("split_with_sizes_default")
    split.meta["val"] = tuple(reversed(val(split)))
    check = lambda: verify.check_values(lowered.graph, {})  # noqa: E731
    assert_rejects("G3", check, "> %split_with_sizes_default = ")


def test_g3_rejects_a_replacement_of_another_layout() -> None:
    marked = toy_forward(toy_weights())
    old, bias = marked.node("unshard_default"), marked.node("unshard_default_1")
    replacements = Replacements(marked.graph)
    with pytest.raises(VerifyError, match=r"^\[G3\] %unshard_default_1 replaces %unshard_default: "):
        replacements.put_alike(old, bias)
    replacements.put_alike(old, marked.node("unshard_default_2"))
    assert not old.users


def _add_input(marked: Marked) -> None:
    with marked.graph.inserting_after(marked.node("head_shard")):
        marked.graph.placeholder("late")


def _drop_result(marked: Marked) -> None:
    output = output_node(marked.graph)
    output.args = (output.args[0][:-1],)  # type: ignore[index]


@pytest.mark.parametrize("damage", [_add_input, _drop_result])
def test_g4_rejects_a_changed_signature(damage: Callable[[Marked], None]) -> None:
    marked = toy_forward(toy_weights())
    before = verify.signature(marked.graph)
    verify.check_signature(marked.graph, before)
    damage(marked)
    assert_rejects("G4", lambda: verify.check_signature(marked.graph, before), "head_shard")


# -- B: buckets


@pytest.mark.parametrize(
    "other",
    [
        Weight("block.b", (4,), 1, group="1"),
        Weight("block.b", (4,), 1, world_size=4),
        Weight("block.b", (4,), 1, device="cuda"),
    ],
    ids=["group", "world size", "device"],
)
def test_b1_rejects_a_gather_of_unlike_members(other: Weight) -> None:
    marked = two_gathers(Weight("block.a", (4,)), Weight("block.c", (2, 4), 2, param_dtype=BF16), other)
    _assert_rejects_the_last_member(marked, UNSHARD)


@pytest.mark.parametrize(
    "other",
    [
        Weight("block.b", (4,), 1, group="1"),
        Weight("block.b", (4,), 1, world_size=4),
        Weight("block.b", (4,), 1, replicas=2),
        Weight("block.b", (4,), 1, dtype=BF16, param_dtype=F32),
        Weight("block.b", (4,), 1, reduce_dtype=F16),
    ],
    ids=["group", "world size", "copies", "stored dtype", "reduce dtype"],
)
def test_b1_rejects_a_reduction_of_unlike_members(other: Weight) -> None:
    like = Weight("block.c", (2, 4), 2, param_dtype=BF16, reduce_dtype=F32, dim=1)
    _assert_rejects_the_last_member(two_reductions(Weight("block.a", (4,)), like, other), REDUCE_GRAD)


def _assert_rejects_the_last_member(marked: Marked, target: Callable[..., object]) -> None:
    like, also_like, unlike = marked.calls(target)
    like.meta["bucket"], also_like.meta["bucket"] = ("planned", 0), ("planned", 1)
    verify.check_buckets(marked.graph, marked.ctx)
    unlike.meta["bucket"] = ("planned", 2)
    check = lambda: verify.check_buckets(marked.graph, marked.ctx)  # noqa: E731
    assert_rejects("B1", check, f"%{unlike.name}: bucket 'planned'", f"%{like.name}")


def test_b1_lets_units_of_equal_settings_share_a_bucket() -> None:
    marked = two_gathers(Weight("block.a", (4,)), Weight("block.c", (2, 4), 2), Weight("other.b", (4,), 1))
    for place, node in enumerate(marked.calls(UNSHARD)):
        node.meta["bucket"] = ("planned", place)
    verify.check_buckets(marked.graph, marked.ctx)


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
def test_l1_rejects_a_gathered_parameter_saved_for_backward(through: tuple[Callable[..., object], ...]) -> None:
    build = GraphBuilder()
    weight = Weight("block.weight", (4, 4))
    x, gathered = build.input("x", [2, 4]), build.unshard(weight)
    saved = gathered
    for view in through:
        saved = build.call(view, saved)
    marked = build.finish(build.call(aten.mm.default, x, gathered), x, saved)
    assert_rejects("L1", lambda: verify.check_reshard(marked.graph, 1), f"%{gathered.name}: is saved for backward")
    verify.check_reshard(marked.graph, 3)  # the same value, when it is a result that the user asked for


def test_l1_accepts_what_is_whole_anyway() -> None:
    build = GraphBuilder()
    gathered = build.unshard(Weight("w", (4,), world_size=1))
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


def test_r1_counts_a_reduction_over_shards_and_copies_once() -> None:
    for changes in ({"replicas": 2}, {"replicas": 2, "world_size": 1}):
        lowered = lowered_until(toy_backward(toy_weights(**changes)))
        verify.check_reductions(lowered.graph, lowered.ctx, TOY_FQNS)


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


def test_d1_rejects_a_coalesced_launch_of_another_dtype() -> None:
    lowered = lowered_until(toy_forward(toy_weights()).coalescing())
    verify.check_dtypes(lowered.graph)
    launch = launches(lowered.graph)[0]
    first, second = val(launch)
    launch.meta["val"] = [first, second.to(BF16)]
    assert_rejects("D1", lambda: verify.check_dtypes(lowered.graph), "moves torch.bfloat16, want torch.float32")


def test_d1_rejects_a_gradient_that_has_not_its_parameters_dtype() -> None:
    marked = two_reductions(Weight("w", (4, 3), param_dtype=BF16, reduce_dtype=F16))
    verify.check_dtypes(marked.graph)
    (reduction,) = marked.calls(REDUCE_GRAD)
    _retyped(reduction, (6,), F16, (1,))
    assert_rejects("D1", lambda: verify.check_dtypes(marked.graph), f"%{reduction.name}: gradient is torch.float16")


def test_d1_rejects_a_partial_gradient_that_is_not_in_the_reduce_dtype() -> None:
    marked = two_reductions(Weight("w", (4, 3), replicas=2, reduce_dtype=F16))
    local = lowered_until(marked.flagged(units=(("", UnitSettings(all_reduce=False)),)), "apply_flags")
    verify.check_dtypes(local.graph)
    (reduction,) = local.calls(REDUCE_GRAD)
    _retyped(reduction, (6,), F32, (1,))
    assert_rejects("D1", lambda: verify.check_dtypes(local.graph), "gradient is torch.float32, want torch.float16")


# -- M: markers


def test_m1_rejects_a_marker_that_is_left() -> None:
    verify.check_lowered(lowered_forward().graph)
    verify.check_lowered(lowered_backward().graph)
    assert_rejects("M1", lambda: verify.check_lowered(toy_forward(toy_weights()).graph), "> %unshard_default = ")
    reduction = two_reductions(Weight("w", (4,)))
    assert_rejects("M1", lambda: verify.check_lowered(reduction.graph), "> %reduce_grad_default = ")


# -- all of them


def test_s2_rejects_a_program_over_its_budget() -> None:
    lowered = lowered_until(toy_forward(toy_weights()))
    peak = peak_bytes(lowered.graph, lowered.ctx)
    verify.check_budget(lowered.graph, lowered.ctx, peak)
    with pytest.raises(VerifyError, match=rf"S2.*allocates {peak} bytes, want at most {peak - 1}"):
        verify.check_budget(lowered.graph, lowered.ctx, peak - 1)


def test_invariants_have_a_rejecting_test_each() -> None:
    listed = set(re.findall(r"\b([A-Z]\d)  ", verify.__doc__ or ""))
    assert len(listed) >= 13
    names = [*globals(), *vars(test_verify_collectives)]
    tested = {match[1].upper() for name in names if (match := re.match(r"test_([a-z]\d)_rejects_", name))}
    assert tested == listed


def test_invariants_raised_are_those_listed() -> None:
    listed = set(re.findall(r"\b([A-Z]\d)  ", verify.__doc__ or ""))
    assert set(re.findall(r"(?:_fail|VerifyError)\(\s*\"([A-Z]\d)\"", inspect.getsource(verify))) == listed
