"""The last change before a program runs or is compiled: its all-gathers over gloo write into outputs made for them.

gloo runs the collectives of a group on two threads, and serves `all_gather_into_tensor` by its coalesced all-gather.
Two of those at once corrupt the heap: of eight runs of 4,000 rounds of four gathers of different sizes four crashed
(torch 2.11 and 2.13), with outputs given none of nine. For CUDA tensors gloo's coalesced all-gather is none at all: it
reads device memory from the host (pytorch/pytorch#152645). Passes, plans, checks and reports know the first form only.

Inductor protects the input of a collective until its wait, but of forms with outputs it does not: `keep_until`, behind
the wait, reads it once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node

from graphshard.compat.groups import resolve_process_group
from graphshard.compat.inductor import copy_graph, module_of
from graphshard.graph.ir import ALL_GATHER, is_call, waits_of

_LIBRARY: Any = torch.library.Library("graphshard", "FRAGMENT")  # type: ignore[no-untyped-call]
# Writes nothing, but what reads `arrived` is ordered behind it, and nothing drops it.
_LIBRARY.define("keep_until(Tensor(a!) arrived, Tensor sent) -> ()")
_LIBRARY.impl("keep_until", lambda arrived, sent: None, "CompositeExplicitAutograd")
KEEP_UNTIL = torch.ops.graphshard.keep_until.default

GATHER_INTO = torch.ops._c10d_functional.all_gather_into_tensor_out.default
_EMPTY = torch.ops.aten.empty.memory_format


def runs_on_gloo(group_name: str, device_type: str) -> bool:
    """Whether gloo runs the collectives of tensors on a kind of device in a process group."""
    return f"{device_type}:gloo" in dist.get_backend_config(resolve_process_group(group_name))


def with_gather_outputs(
    gm: GraphModule, is_gloo: Callable[[str, str], bool] = runs_on_gloo, compiled: bool = True
) -> GraphModule:
    """The same program with outputs given to its all-gathers of fixed size; `gm` itself where none needs that.

    Args:
        gm: a lowered program.
        is_gloo: whether tensors on a kind of device go over gloo in a process group of this name.
        compiled: whether a compiler may use memory again; else the collective itself holds what it reads.
    """
    if not any(_needs_output(node, is_gloo) for node in gm.graph.nodes):
        return gm
    graph = copy_graph(gm)
    for node in [node for node in graph.nodes if _needs_output(node, is_gloo)]:
        value = node.meta["val"]
        with graph.inserting_before(node):
            out = graph.call_function(_EMPTY, (list(value.shape),), {"dtype": value.dtype, "device": value.device})
        out.meta["val"] = value
        node.target = GATHER_INTO
        node.kwargs = {"out": out}
        for wait in waits_of(node) if compiled else ():
            with graph.inserting_after(wait):
                graph.call_function(KEEP_UNTIL, (wait, node.args[0])).meta["val"] = None
    return module_of(gm, graph)


def _needs_output(node: Node, is_gloo: Callable[[str, str], bool]) -> bool:
    if not is_call(node, ALL_GATHER):
        return False
    value = node.meta["val"]
    if value.device.type not in ("cpu", "cuda") or not all(isinstance(size, int) for size in value.shape):
        return False
    return is_gloo(str(node.args[-1]), value.device.type)
