"""Invariants of launches and waits: each rejects a graph that breaks it and accepts the graph that does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch.fx import Node

from graphshard.graph import verify
from graphshard.graph.builder import Builder
from graphshard.graph.ir import ALL_REDUCE, COALESCED_REDUCE_SCATTER, REDUCE_SCATTER, WAIT, aten, launches, waits_of
from graphshard.graph.markers import REDUCE_GRAD
from tests.graph.graphs import BF16, Weight, lowered_until, toy_backward, toy_forward, toy_weights, two_reductions
from tests.graph.rejection import assert_rejects, lowered_backward, lowered_forward


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


def test_c1_wants_a_wait_for_each_tensor_of_a_coalesced_launch() -> None:
    lowered = lowered_until(toy_forward(toy_weights()).coalescing())
    verify.check_waits(lowered.graph)
    wait = lowered.calls(WAIT)[1]
    result = wait.all_input_nodes[0]
    launch = result.all_input_nodes[0]
    wait.replace_all_uses_with(lowered.calls(WAIT)[0])
    lowered.graph.erase_node(wait)
    assert_rejects("C1", lambda: verify.check_waits(lowered.graph), f"%{launch.name}: got 1 waits, want 2")


def test_c2_rejects_a_read_of_a_coalesced_result_before_its_wait() -> None:
    lowered = lowered_until(toy_forward(toy_weights()).coalescing())
    verify.check_hazards(lowered.graph)
    wait = lowered.calls(WAIT)[1]
    reader = Builder(lowered.graph, wait).call(aten.neg.default, wait.all_input_nodes[0])
    assert_rejects("C2", lambda: verify.check_hazards(lowered.graph), f"%{reader.name}: reads")


def test_c2_rejects_a_write_to_any_input_of_a_coalesced_launch_before_the_last_wait() -> None:
    lowered = lowered_until(toy_backward(toy_weights()).coalescing())
    launch = lowered.calls(COALESCED_REDUCE_SCATTER)[0]
    last = waits_of(launch)[-1]
    writer = Builder(lowered.graph, last).call(aten.zero_.default, launch.args[0][-1])  # type: ignore[index]
    assert_rejects("C2", lambda: verify.check_hazards(lowered.graph), f"%{writer.name}: writes")


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
    marked = toy_forward(toy_weights())
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


def test_c3_rejects_a_lost_all_reduce() -> None:
    marked = toy_backward(toy_weights(replicas=2))
    before = verify.traffic(marked.graph, marked.ctx)
    lowered = lowered_until(marked)
    verify.check_traffic(lowered.graph, lowered.ctx, before)
    wait = next(node for node in lowered.calls(WAIT) if node.all_input_nodes[0].target is ALL_REDUCE)
    launch = wait.all_input_nodes[0]
    wait.replace_all_uses_with(launch.all_input_nodes[0])
    for node in (wait, launch):
        lowered.graph.erase_node(node)
    check = lambda: verify.check_traffic(lowered.graph, lowered.ctx, before)  # noqa: E731
    assert_rejects("C3", check, "head: all_reduce got None")


def test_c3_rejects_another_dtype_on_the_wire() -> None:
    weight = Weight("block.weight", (4, 3), reduce_dtype=BF16)
    marked = two_reductions(weight)
    before = verify.traffic(marked.graph, marked.ctx)
    (marker,) = marked.calls(REDUCE_GRAD)
    marker.update_arg(2, str(Weight("block.weight", (4, 3)).spec))
    check = lambda: verify.check_traffic(marked.graph, marked.ctx, before)  # noqa: E731
    assert_rejects("C3", check, "block.weight: reduce_scatter", "bfloat16", "float32")


def test_c3_counts_markers_and_launches_alike() -> None:
    backwards = [{"world_size": 3}, {"replicas": 2}, {"world_size": 1, "replicas": 2}]
    for marked in (toy_forward(toy_weights()), *(toy_backward(toy_weights(**changes)) for changes in backwards)):
        before = verify.traffic(marked.graph, marked.ctx)
        assert before
        lowered = lowered_until(marked)
        verify.check_traffic(lowered.graph, lowered.ctx, before)
