"""Each gathered parameter is saved for backward or gathered again, as its own policy says."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from graphshard import driver
from graphshard.ir import aten, output_args
from graphshard.markers import UNSHARD
from graphshard.passes import tag_reshard
from graphshard.passes.tag_reshard import ReshardEdit
from tests.graph.graphs import Weight, trace, two_gathers


@pytest.mark.parametrize(
    ("weight", "policy"),
    [
        (Weight("w", (4,), reshard=True), CheckpointPolicy.MUST_RECOMPUTE),
        (Weight("w", (4,), reshard=False), CheckpointPolicy.MUST_SAVE),
        (Weight("w", (4,), reshard=True, world_size=1), CheckpointPolicy.MUST_RECOMPUTE),
        (Weight("w", (4,), reshard=False, world_size=1), CheckpointPolicy.MUST_RECOMPUTE),
    ],
    ids=["reshard", "keep", "reshard alone", "keep alone"],
)
def test_tag_reshard_follows_the_policy(weight: Weight, policy: CheckpointPolicy) -> None:
    marked = two_gathers(weight)
    tag_reshard.apply(marked.graph, tag_reshard.decide(marked.graph, marked.ctx))
    (node,) = marked.calls(UNSHARD)
    assert node.meta["recompute"] is policy
    assert not tag_reshard.decide(marked.graph, marked.ctx)


def test_tag_reshard_tags_each_marker_by_its_own_policy_and_nothing_else() -> None:
    marked = two_gathers(Weight("a", (4,)), Weight("b", (4,), reshard=False), Weight("c", (4,)))
    edit = tag_reshard.decide(marked.graph, marked.ctx)
    assert edit == ReshardEdit(("unshard_default", "unshard_default_2"), ("unshard_default_1",))
    tag_reshard.apply(marked.graph, edit)
    assert all(("recompute" in node.meta) == (node.target is UNSHARD) for node in marked.graph.nodes)


def test_tag_reshard_replaces_the_tag_of_a_checkpoint_region() -> None:
    marked = two_gathers(Weight("w", (4,), reshard=False))
    (node,) = marked.calls(UNSHARD)
    node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    tag_reshard.apply(marked.graph, tag_reshard.decide(marked.graph, marked.ctx))
    assert node.meta["recompute"] is CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize(("reshard", "world_size"), [(True, 2), (False, 2), (True, 1), (False, 1)])
def test_tag_reshard_is_what_the_partitioner_does(reshard: bool, world_size: int) -> None:
    weights = [Weight(f"w{i}", (6, 6), reshard=reshard, world_size=world_size) for i in range(2)]

    def two_layers(read, x):  # type: ignore[no-untyped-def]
        return torch.relu(x @ read(0)) @ read(1)

    traced = trace(two_layers, weights, [torch.zeros(4, 6, requires_grad=True)], driver.run_joint_passes)
    again = reshard or world_size == 1
    assert len(traced.forward.calls(UNSHARD)) == 2
    assert len(traced.backward.calls(UNSHARD)) == (2 if again else 0)
    saved = output_args(traced.forward.graph)[traced.num_results :]
    bases = [node.all_input_nodes[0] if node.target is aten.t.default else node for node in saved]
    assert sum(node.target is UNSHARD for node in bases) == (0 if again else 2)
    driver.check_partition(traced.forward.gm, traced.num_results)
