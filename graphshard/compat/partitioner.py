"""AOTAutograd's min-cut partitioner: what it is told, and what of its results is mended."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from functorch.compile import min_cut_rematerialization_partition  # type: ignore[import-untyped]
from torch._dynamo.exc import BackendCompilerFailed as BackendCompilerFailed
from torch._functorch import config
from torch._functorch.partitioners import must_recompute
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
from torch.fx import Graph, GraphModule, Node, traceback
from torch.utils.checkpoint import CheckpointPolicy

from graphshard.compat.inductor import module_like
from graphshard.compat.random_calls import call_of, can_draw, give_values

# Larger than any id that activation checkpointing gives to its regions.
_RESHARD_REGION_ID = 10**6
_IN_BACKWARD = "must_be_in_backward"


def tag_reshard(node: Node) -> None:
    """Makes the partitioner gather again in backward. Untagged, the gathered value would be saved."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = _RESHARD_REGION_ID


def tag_saved(node: Node) -> None:
    """Forbids the partitioner to compute a node again; what backward needs of it is saved."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def tag_backward(node: Node) -> None:
    """Keeps a node in backward that does not depend on gradients of outputs."""
    node.meta["partitioner_tag"] = _IN_BACKWARD


def is_tagged_backward(node: Node) -> bool:
    """Whether that was done."""
    return bool(node.meta.get("partitioner_tag") == _IN_BACKWARD)


def has_budget(graph: Graph) -> bool:
    """Whether the user has given the partitioner a budget of activations: for all that is compiled, or around this."""
    if config.activation_memory_budget != 1.0:
        return True
    key = getattr(traceback, "MEMORY_BUDGET_ANNOTATION_KEY", "")  # since torch 2.13
    return any("memory_budget" in node.meta or key in (node.meta.get("custom") or ()) for node in graph.nodes)


def partition(joint: GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
    """Splits a joint graph by AOTAutograd's min-cut."""
    kwargs.pop("compiler", None)
    _return_own_meshes(joint, kwargs["num_fwd_outputs"])
    for node in joint.graph.nodes:
        if must_recompute(node) and can_draw(node) and call_of(node).argument("dropout_p") == 0.0:
            node.target = _not_random(node.target)
    forward, backward = min_cut_rematerialization_partition(joint, joint_inputs, compiler="inductor", **kwargs)
    graphs = module_like(forward, forward.graph), module_like(backward, backward.graph)
    for gm in graphs:
        for node in gm.graph.nodes:
            node.target = getattr(node.target, "random_operator", node.target)
        give_values(gm.graph)
    _erase_repeated_waits(*graphs)
    return graphs


@cache
def _not_random(target: Callable[..., Any]) -> Callable[..., Any]:
    """Attention without dropout, for a partitioner that has all random operators which are recomputed take up a state
    of their own: on CUDA a generator, which makes no two layers alike.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    call.random_operator = target  # type: ignore[attr-defined]
    return call


def _erase_repeated_waits(*graphs: GraphModule) -> None:
    """Erases collectives of the model that are in both graphs where nothing reads their result.

    Waits have side effects, so that the partitioner leaves what only one graph needs in the other too.
    """
    names = [{node.name for node in gm.graph.nodes} for gm in graphs]
    both = names[0].intersection(*names[1:])
    for gm in graphs:
        for node in reversed(gm.graph.nodes):
            repeated = node.name in both and getattr(node.target, "namespace", "") == "_c10d_functional"
            if node.op == "call_function" and not node.users and (repeated or not node.is_impure()):
                gm.graph.erase_node(node)
        gm.recompile()


def _return_own_meshes(joint: GraphModule, num_fwd_outputs: int) -> None:
    """Returns the graph's own mesh with an output that is a DTensor.

    DTensor's cache of sharding rules may yield an equal mesh of an earlier computation, which AOTAutograd knows only
    as part of the output's gradient: forward cannot return that (torch 2.13).
    """
    output = next(iter(joint.graph.find_nodes(op="output")))
    results = list(output.args[0])

    def mesh(node: Any) -> Any:
        value = node.meta.get("val") if isinstance(node, Node) and node.op == "placeholder" else None
        return getattr(value, "real_obj", None)

    for i, result in enumerate(results[:num_fwd_outputs]):
        if (found := mesh(result)) is None or not result.name.startswith("tangents"):
            continue
        own = (node for node in joint.graph.nodes if not node.name.startswith("tangents") and mesh(node) == found)
        results[i] = next(own, result)
    output.args = (type(output.args[0])(results),)
