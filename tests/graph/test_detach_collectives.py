"""Copies that Dynamo puts in the place of what c10d writes bring no gradient; others do."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import _functional_collectives
from torch.fx import Graph, Node

from graphshard.compat.dynamo import DATA
from graphshard.graph.ir import PassContext
from graphshard.passes import detach_collectives

_c10d = torch.ops._c10d_functional
BY_USER = '  File "model.py", line 1, in forward\n'
IN_PLACE = f'{BY_USER}  File "{_functional_collectives.__file__}", line 2, in all_reduce_inplace\n'


def copied(launch: Any, stack_trace: str | None) -> tuple[Graph, Node, Node, Node]:
    """What a launch yields, copied: with the copy, where it is written and what is copied."""
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    wait = graph.call_function(_c10d.wait_tensor, (graph.call_function(launch, (x,)),))
    copy = graph.call_method("copy_", (y, wait))
    copy.stack_trace = stack_trace
    graph.output(y)
    edit = detach_collectives.decide(graph, PassContext("captured"))
    detach_collectives.apply(graph, edit)
    graph.lint()
    return graph, copy, y, wait


def test_autograd_does_not_see_what_is_written() -> None:
    for launch in (_c10d.all_gather_into_tensor, _c10d.all_reduce.default):
        _, copy, written, source = copied(launch, IN_PLACE)
        data, sent = copy.all_input_nodes
        assert (data.target, data.args, sent) == (DATA, (written,), source)


def test_copies_of_users_keep_their_gradients() -> None:
    for stack_trace in (BY_USER, None):
        graph, copy, written, source = copied(_c10d.all_reduce, stack_trace)
        assert copy.args == (written, source)
        assert not detach_collectives.decide(graph, PassContext("captured"))
