"""Each gathered parameter is gathered again in backward, whatever its unit's policy: that is a flag of programs."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from graphshard.graph.ir import aten, output_args
from graphshard.graph.markers import REDUCE_GRAD, UNSHARD
from graphshard.lowering import driver
from graphshard.passes import tag_reshard
from graphshard.passes.tag_reshard import ReshardEdit
from tests.graph.graphs import Weight, trace, two_gathers


def test_tag_reshard_tags_each_marker_and_nothing_else() -> None:
    marked = two_gathers(Weight("a", (4,)), Weight("b", (4,), world_size=1), Weight("c", (4,), replicas=2))
    edit = tag_reshard.decide(marked.graph, marked.ctx)
    assert edit == ReshardEdit(("unshard_default", "unshard_default_1", "unshard_default_2"))
    tag_reshard.apply(marked.graph, edit)
    for node in marked.graph.nodes:
        want = CheckpointPolicy.MUST_RECOMPUTE if node.target is UNSHARD else None
        assert node.meta.get("recompute") is want
    assert not tag_reshard.decide(marked.graph, marked.ctx)


def test_tag_reshard_replaces_the_tag_of_a_checkpoint_region() -> None:
    marked = two_gathers(Weight("w", (4,)))
    (node,) = marked.calls(UNSHARD)
    node.meta["recompute"] = CheckpointPolicy.PREFER_SAVE
    tag_reshard.apply(marked.graph, tag_reshard.decide(marked.graph, marked.ctx))
    assert node.meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE


@pytest.mark.parametrize("world_size", [1, 2])
def test_tag_reshard_is_what_the_partitioner_does(world_size: int) -> None:
    weights = [Weight(f"w{i}", (6, 6), world_size=world_size) for i in range(2)]

    def two_layers(read, x):  # type: ignore[no-untyped-def]
        return torch.relu(x @ read(0)) @ read(1)

    traced = trace(two_layers, weights, [torch.zeros(4, 6, requires_grad=True)], driver.run_joint_passes)
    assert len(traced.forward.calls(UNSHARD)) == 2
    assert len(traced.backward.calls(UNSHARD)) == 2
    saved = output_args(traced.forward.graph)[traced.num_results :]
    bases = [node.all_input_nodes[0] if node.target is aten.t.default else node for node in saved]
    assert not [node for node in bases if node.target is UNSHARD]
    driver.check_partition(traced.forward.gm, traced.num_results)


def test_tag_reshard_has_saved_what_would_gather_a_parameter_for_backward_alone() -> None:
    weights = [Weight("w", (6, 6)), Weight("shift", (8, 1, 6))]
    gathered = []
    for rows in (2, 16):  # for 2, saving the product would take less than saving the sum

        def layer(read, x):  # type: ignore[no-untyped-def]
            return torch.sin((x @ read(0) + read(1)).sum(1))

        traced = trace(layer, weights, [torch.zeros(rows, 6, requires_grad=True)], driver.run_joint_passes)
        gathered.append(len(traced.backward.calls(UNSHARD)))
    assert gathered == [1, 1]


def test_tag_reshard_saves_no_cast_of_what_is_gathered() -> None:
    def cast(read, x):  # type: ignore[no-untyped-def]
        return x @ read(0).to(torch.bfloat16)

    x = torch.zeros(4, 6, dtype=torch.bfloat16, requires_grad=True)
    traced = trace(cast, [Weight("w", (6, 6))], [x], driver.run_joint_passes)
    assert len(traced.backward.calls(UNSHARD)) == 1
    saved = output_args(traced.forward.graph)[traced.num_results :]
    bases = [node.all_input_nodes[0] if node.target is aten.t.default else node for node in saved]
    assert all(node.op == "placeholder" for node in bases)


class Constant(torch.autograd.Function):
    """Adds a weight whose gradient is the same whatever comes."""

    @staticmethod
    def forward(ctx, x, weight):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x + weight

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad, ctx.saved_tensors[0].sum(0)


def test_tag_reshard_has_a_gradient_reduced_in_backward_that_does_not_depend_on_what_comes() -> None:
    def shifted(read, x):  # type: ignore[no-untyped-def]
        return Constant.apply(x, read(0)).sin()

    traced = trace(shifted, [Weight("w", (6,))], [torch.zeros(4, 6, requires_grad=True)], driver.run_joint_passes)
    assert not traced.forward.calls(REDUCE_GRAD)
    assert len(traced.backward.calls(REDUCE_GRAD)) == 1
