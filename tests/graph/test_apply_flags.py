"""One backward graph for each state of gradient accumulation and of outputs without a gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Node

from graphshard.fsdp2.settings import UnitSettings
from graphshard.graph import verify
from graphshard.graph.ir import Flags, aten, output_args
from graphshard.graph.markers import REDUCE_GRAD
from graphshard.passes import apply_flags
from graphshard.passes.apply_flags import FlagsEdit
from tests.graph.graphs import BF16, F16, F32, GraphBuilder, Marked, Weight, toy_backward, toy_forward, toy_weights

A, B = Weight("a", (4, 3)), Weight("b", (5,), 1)


def backward_of_two_outputs(*weights: Weight) -> Marked:
    """Tangents 1 and 2 each give a weight its gradient; a third weight, if any, gets the sum of both."""
    build = GraphBuilder("backward")
    for weight in weights:
        build.shard(weight)
    tangents = [build.input(f"tangents_{i}", weight.size, weight.spec.dtype) for i, weight in enumerate(weights[:2], 1)]
    grads = [build.call(aten.mul.Tensor, tangent, 2) for tangent in tangents]
    if len(weights) == 3:
        grads.append(build.call(aten.add.Tensor, tangents[0], build.call(aten.sum.default, tangents[1])))
    return build.finish(*(build.reduce(grad, weight) for grad, weight in zip(grads, weights, strict=True)))


def applied(marked: Marked) -> FlagsEdit:
    edit = apply_flags.decide(marked.graph, marked.ctx)
    apply_flags.apply(marked.graph, edit)
    marked.graph.lint()
    assert not apply_flags.decide(marked.graph, marked.ctx)
    return edit


def placeholders(marked: Marked) -> list[str]:
    return [node.name for node in marked.graph.nodes if node.op == "placeholder"]


def test_flags_default_decides_nothing() -> None:
    assert not applied(backward_of_two_outputs(A, B))


@pytest.mark.parametrize("direction", ["forward", "inference", "joint"])
def test_flags_are_for_backward_only(direction: str) -> None:
    marked = toy_forward(toy_weights(), direction).flagged(unreduced=frozenset({"head_shard"}))  # type: ignore[arg-type]
    assert not applied(marked)


def test_flags_unreduced_hands_out_the_gradient_itself() -> None:
    marked = backward_of_two_outputs(A, B).flagged(unreduced=frozenset({"a_shard"}))
    assert applied(marked) == FlagsEdit(unreduced=("reduce_grad_default",))
    first, second = output_args(marked.graph)
    assert first is marked.node("mul_tensor")
    assert second.target is REDUCE_GRAD
    assert placeholders(marked) == ["a_shard", "b_shard", "tangents_1", "tangents_2"]


def test_flags_added_comes_before_the_gradient() -> None:
    marked = backward_of_two_outputs(A, B).flagged(added=(("b_shard", F32), ("a_shard", F32)))
    edit = applied(marked)
    assert edit.added == (("reduce_grad_default_1", F32, False), ("reduce_grad_default", F32, False))
    # New arguments come last, in the order of the flag.
    assert placeholders(marked)[-2:] == ["held_b_shard", "held_a_shard"]
    for reduction, grad in zip(marked.calls(REDUCE_GRAD), ("mul_tensor", "mul_tensor_1"), strict=True):
        total, shard = reduction.args[0], reduction.args[1]
        assert isinstance(total, Node) and isinstance(shard, Node)
        assert total.target is aten.add.Tensor
        assert total.args == (marked.node(f"held_{shard.name}"), marked.node(grad))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_flags_added_has_the_dtype_that_they_say(dtype: torch.dtype) -> None:
    weight = Weight("a", (4, 3), param_dtype=BF16, reduce_dtype=F32)
    marked = backward_of_two_outputs(weight).flagged(added=(("a_shard", dtype),))
    applied(marked)
    held, (total,) = marked.node("held_a_shard"), marked.calls(aten.add.Tensor)
    assert (held.meta["val"].dtype, held.meta["val"].shape) == (dtype, (4, 3))
    assert total.meta["val"].dtype == dtype


def test_flags_added_twice_is_a_sum_of_earlier_backwards_and_of_this_one() -> None:
    marked = backward_of_two_outputs(A).flagged(added=(("a_shard", F32), ("a_shard", F32)))
    applied(marked)
    assert placeholders(marked)[-2:] == ["held_a_shard", "held_a_shard_"]
    (reduction,) = marked.calls(REDUCE_GRAD)
    outer = reduction.args[0]
    assert isinstance(outer, Node)
    earlier, inner = outer.all_input_nodes
    assert earlier is marked.node("held_a_shard_")
    assert inner.args == (marked.node("held_a_shard"), marked.node("mul_tensor"))


def test_flags_added_to_what_stays_unreduced() -> None:
    marked = backward_of_two_outputs(A).flagged(added=(("a_shard", F32),), unreduced=frozenset({"a_shard"}))
    applied(marked)
    (total,) = output_args(marked.graph)
    assert total.args == (marked.node("held_a_shard"), marked.node("mul_tensor"))
    assert not marked.calls(REDUCE_GRAD)


@pytest.mark.parametrize("adds_in_reduce_dtype", [False, True])
def test_flags_added_casts_a_gradient_first_where_fsdp2_does(adds_in_reduce_dtype: bool) -> None:
    weight = Weight("a", (4, 3), param_dtype=BF16, reduce_dtype=F32)
    marked = backward_of_two_outputs(weight).flagged(added=(("a_shard", F32),))
    ref = replace(weight.ref, adds_in_reduce_dtype=adds_in_reduce_dtype)
    marked.ctx = replace(marked.ctx, params={"a_shard": ref})
    applied(marked)
    (total,) = marked.calls(aten.add.Tensor)
    assert total.args[0] is marked.node("held_a_shard")
    term = total.args[1]
    assert isinstance(term, Node)
    assert term.meta["val"].dtype == (F32 if adds_in_reduce_dtype else BF16)
    assert (term is marked.node("mul_tensor")) != adds_in_reduce_dtype


HYBRID = Weight("a", (5, 3), replicas=2, param_dtype=BF16, reduce_dtype=F16)


def test_flags_local_leaves_a_gradient_in_the_reduce_dtype() -> None:
    marked = backward_of_two_outputs(HYBRID, B).flagged(units=(("", UnitSettings(all_reduce=False)),))
    assert applied(marked) == FlagsEdit(local=("reduce_grad_default",))
    partial, whole = marked.calls(REDUCE_GRAD)
    assert output_args(marked.graph) == [partial, whole]
    assert (partial.meta["val"].dtype, partial.meta["val"].shape) == (F16, (HYBRID.shard_numel,))
    verify.check_dtypes(marked.graph)
    verify.check_values(marked.graph, {})


def test_flags_local_is_nothing_where_there_are_no_copies() -> None:
    assert not applied(backward_of_two_outputs(A, B).flagged(units=(("", UnitSettings(all_reduce=False)),)))


@pytest.mark.parametrize("all_reduce", [False, True])
def test_flags_partial_is_one_more_argument_for_the_collective(all_reduce: bool) -> None:
    marked = backward_of_two_outputs(HYBRID, B).flagged(
        partial=("a_shard",), units=(("", UnitSettings(all_reduce=all_reduce)),)
    )
    before = marked.calls(REDUCE_GRAD)[0].args
    assert applied(marked).partial == ("reduce_grad_default",)
    assert placeholders(marked)[-1] == "partial_a_shard"
    value = marked.node("partial_a_shard").meta["val"]
    assert (value.dtype, value.shape) == (F16, (HYBRID.shard_numel,))
    assert marked.calls(REDUCE_GRAD)[0].args == before


def test_flags_partial_stays_on_the_device_of_the_gradient_of_an_offloaded_shard() -> None:
    marked = backward_of_two_outputs(HYBRID).flagged(
        partial=("a_shard",), units=(("", UnitSettings(all_reduce=False)),)
    )
    with FakeTensorMode() as mode:
        marked.node("mul_tensor").meta["val"] = torch.empty(5, 3, device="cuda")
        for node in (marked.node("a_shard"), marked.node("reduce_grad_default")):
            node.meta["val"] = mode.from_tensor(torch.empty(9))
    applied(marked)
    for name in ("partial_a_shard", "reduce_grad_default"):
        assert marked.node(name).meta["val"].device.type == "cuda"


def test_flags_inputs_only_reduces_nothing() -> None:
    build = GraphBuilder("backward")
    tangent = build.input("tangents_1", [4, 3])
    full = build.unshard(A)
    marked = build.finish(build.reduce(tangent, A), build.call(aten.mul.Tensor, tangent, full))
    marked = marked.flagged(inputs_only=True)
    assert applied(marked) == FlagsEdit(dead_outputs=(0,))
    first, second = output_args(marked.graph)
    assert first is None
    assert second.target is aten.mul.Tensor
    assert not marked.calls(REDUCE_GRAD)


def test_flags_undefined_makes_dead_results_none() -> None:
    marked = backward_of_two_outputs(A, B).flagged(undefined=frozenset({"tangents_1"}))
    assert applied(marked) == FlagsEdit(dead_outputs=(0,))
    first, second = output_args(marked.graph)
    assert first is None
    assert second.target is REDUCE_GRAD
    assert [node.name for node in marked.calls(aten.mul.Tensor)] == ["mul_tensor_1"]
    assert len(placeholders(marked)) == 4  # arguments stay


def test_flags_undefined_keeps_results_that_another_tangent_reaches() -> None:
    marked = backward_of_two_outputs(A, B, Weight("c", (4, 3), 2)).flagged(undefined=frozenset({"tangents_1"}))
    assert applied(marked).dead_outputs == (0,)
    assert [result is None for result in output_args(marked.graph)] == [True, False, False]


def test_flags_undefined_everywhere_leaves_nothing() -> None:
    marked = backward_of_two_outputs(A, B, Weight("c", (4, 3), 2)).flagged(
        undefined=frozenset({"tangents_1", "tangents_2"})
    )
    applied(marked)
    assert output_args(marked.graph) == [None, None, None]
    assert all(node.op in ("placeholder", "output") for node in marked.graph.nodes)


def test_flags_undefined_keeps_results_without_any_tangent() -> None:
    build = GraphBuilder("backward")
    x, tangent = build.input("x", [3]), build.input("tangents_1", [3])
    marked = build.finish(build.call(aten.neg.default, x), build.call(aten.neg.default, tangent), None)
    marked = marked.flagged(undefined=frozenset({"tangents_1"}))
    assert applied(marked).dead_outputs == (1,)
    assert output_args(marked.graph)[0] is not None


def test_flags_mix() -> None:
    weights = [*toy_weights(1), Weight("other", (3,), 1)]
    build_flags = {
        "unreduced": frozenset({"head_shard"}),
        "added": (("blocks_0_bias_shard", F32),),
        "undefined": frozenset({"tangents_2"}),
    }
    build = GraphBuilder("backward")
    for weight in weights:
        build.shard(weight)
    tangents = [build.input(f"tangents_{i}", [4]) for i in (1, 2)]
    grads = [
        build.call(
            aten.expand.default, build.call(aten.sum.default, tangents[weight.fqn == "other"]), list(weight.size)
        )
        for weight in weights
    ]
    marked = build.finish(*(build.reduce(grad, weight) for grad, weight in zip(grads, weights, strict=True)))
    marked = marked.flagged(**build_flags)
    edit = applied(marked)
    assert (len(edit.unreduced), len(edit.added), edit.dead_outputs) == (1, 1, (3,))
    block_weight, block_bias, head, other = output_args(marked.graph)
    assert other is None
    assert head is marked.node("expand_default_2")
    assert block_bias.args[0].args[0].name == "held_blocks_0_bias_shard"
    assert block_weight.target is block_bias.target is REDUCE_GRAD


def test_flags_print_what_differs_from_the_default() -> None:
    assert str(Flags()) == "default"
    flags = Flags(
        resident=("r",),
        unreduced=frozenset({"a", "b"}),
        added=(("c", F32),),
        undefined=frozenset({"tangents_2", "tangents_1"}),
    )
    assert str(flags) == "resident=1 unreduced=2 added=1 undefined=tangents_1,tangents_2"
    flags = Flags(inputs_only=True, units=(("", UnitSettings(force_sum=True)), ("u", UnitSettings(divide_factor=2.0))))
    assert str(flags) == "inputs_only root(force_sum=True) u(divide_factor=2.0)"


def test_flags_say_the_settings_of_each_unit() -> None:
    flags = Flags(units=(("u", UnitSettings(divide_factor=2.0)),))
    assert flags.settings("u").divide_factor == 2.0
    assert flags.settings("") == UnitSettings()


@pytest.mark.parametrize("world_size", [1, 2])
def test_flags_leave_values_of_the_right_type(world_size: int) -> None:
    weights = toy_weights(world_size=world_size, param_dtype=BF16, reduce_dtype=F32)
    marked = toy_backward(weights).flagged(unreduced=frozenset(weight.shard_name for weight in weights))
    applied(marked)
    for weight, result in zip(weights, output_args(marked.graph), strict=True):
        value = result.meta["val"]
        assert (tuple(value.shape), value.dtype) == (weight.size, BF16)
    assert not marked.calls(REDUCE_GRAD)
