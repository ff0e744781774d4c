"""Faults put into compiled programs on purpose. A test that still passes under one of them tests nothing.

    with dropped_reduction() as edited, pytest.raises(ParityError):
        check_parity(...)
    assert edited.count > 0

Each context manager edits every program that is lowered inside it, before it is compiled; the functions over a graph
are here to be used alone. Seen from PyTorch's own tests, several pass with the reduction dropped: parameters that never
move hide it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, fx

from graphshard.lowering import driver
from graphshard.passes.apply_flags import HELD

_COLLECTIVE = torch.ops._c10d_functional


@dataclass
class Edited:
    """How many nodes a mutant has changed so far; 0 at the end: it found nothing to break."""

    count: int = 0


def dropped_reduction() -> AbstractContextManager[Edited]:
    """No gradient is reduced: each rank keeps its own chunk, as if the others had sent nothing."""
    return _mutated(lambda gm, direction: drop_reductions(gm))


def stale_gather() -> AbstractContextManager[Edited]:
    """All-gathers send what they sent in a program's first run: parameters before the first optimizer step."""
    _stale_inputs.clear()
    return _mutated(lambda gm, direction: stale_gathers(gm))


def wrong_divide_factor() -> AbstractContextManager[Edited]:
    """Averages become sums, sums become averages."""
    return _mutated(lambda gm, direction: swap_average_and_sum(gm))


def lost_accumulation() -> AbstractContextManager[Edited]:
    """A backward that reduces forgets what the backwards before it had accumulated."""
    return _mutated(lambda gm, direction: lose_accumulations(gm))


@contextmanager
def _mutated(edit: Callable[[fx.GraphModule, str], int]) -> Iterator[Edited]:
    edited = Edited()

    def hook(gm: fx.GraphModule, direction: str) -> None:
        edited.count += edit(gm, direction)

    with driver.after_lowering(hook):
        yield edited


def drop_reductions(gm: fx.GraphModule) -> int:
    """Replaces each reduce-scatter and all-reduce by this rank's own part of its input; returns how many.

    `wait(reduce_scatter(x, op, W, group))` -> `wait(own_chunk(x, W))`; an all-reduce becomes a copy of its input.
    """
    nodes = _launches(gm, "reduce_scatter_tensor", "all_reduce")
    for node in nodes:
        group_size = node.args[2] if "reduce_scatter" in str(node.target) else 1
        _replace(node, torch.ops.graphshard_testing.own_chunk.default, (node.args[0], group_size))
    return _finished(gm, nodes)


def stale_gathers(gm: fx.GraphModule) -> int:
    """Makes each all-gather read what its input was the first time; returns how many.

    `all_gather(x, W, group)` -> `all_gather(first_seen(x, place), W, group)`.
    """
    nodes = _launches(gm, "all_gather_into_tensor")
    for node in nodes:
        shard = node.args[0]
        assert isinstance(shard, fx.Node)
        place = _new_place()
        with gm.graph.inserting_before(node):
            stale = gm.graph.call_function(torch.ops.graphshard_testing.first_seen.default, (shard, place))
        stale.meta = dict(shard.meta)
        node.replace_input_with(shard, stale)
    return _finished(gm, nodes)


def swap_average_and_sum(gm: fx.GraphModule) -> int:
    """Changes the operator of each reduction, ``"avg"`` to ``"sum"`` and back; returns how many."""
    swapped = {"avg": "sum", "sum": "avg"}
    nodes = [node for node in _launches(gm, "reduce_scatter_tensor", "all_reduce") if node.args[1] in swapped]
    for node in nodes:
        node.update_arg(1, swapped[str(node.args[1])])
    return _finished(gm, nodes)


def lose_accumulations(gm: fx.GraphModule) -> int:
    """Takes each sum with a held gradient out again; returns how many.

    `%t = add(%held_s, %g)` -> `%g`.
    """
    held = [node for node in gm.graph.nodes if node.op == "placeholder" and node.name.startswith(HELD)]
    sums = [node for placeholder in held for node in placeholder.users]
    for node in sums:
        (fresh,) = (operand for operand in node.all_input_nodes if operand not in held)
        node.replace_all_uses_with(fresh)
        gm.graph.erase_node(node)
    return _finished(gm, sums)


def _launches(gm: fx.GraphModule, *names: str) -> list[fx.Node]:
    """Launches of the functional collectives so named, coalesced and out variants left out."""
    targets = {getattr(_COLLECTIVE, name).default for name in names}
    return [node for node in gm.graph.nodes if node.op == "call_function" and node.target in targets]


def _replace(node: fx.Node, target: Callable[..., object], args: tuple[object, ...]) -> None:
    """Puts `target(*args)` in a launch's place; its wait goes too, for there is nothing to wait for."""
    with node.graph.inserting_before(node):
        other = node.graph.call_function(target, args)  # type: ignore[arg-type]
    other.meta = dict(node.meta)
    waits = [user for user in node.users if user.target is _COLLECTIVE.wait_tensor.default]
    for wait in waits:
        wait.replace_all_uses_with(other)
        node.graph.erase_node(wait)
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def _finished(gm: fx.GraphModule, nodes: list[fx.Node]) -> int:
    gm.graph.lint()
    gm.recompile()
    return len(nodes)


# Custom operators, not Python functions: Inductor compiles around them.
_stale_inputs: dict[int, Tensor] = {}
_places = 0


def _new_place() -> int:
    global _places
    _places += 1
    return _places


@torch.library.custom_op("graphshard_testing::first_seen", mutates_args=())
def _first_seen(x: Tensor, place: int) -> Tensor:
    return _stale_inputs.setdefault(place, x.clone()).clone()


@_first_seen.register_fake
def _(x: Tensor, place: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("graphshard_testing::own_chunk", mutates_args=())
def _own_chunk(x: Tensor, group_size: int) -> Tensor:
    # The innermost axis of a mesh, which reduce-scatters run over, holds neighbouring ranks.
    return x.chunk(group_size)[dist.get_rank() % group_size].clone()


@_own_chunk.register_fake
def _(x: Tensor, group_size: int) -> Tensor:
    return x.new_empty(x.shape[0] // group_size, *x.shape[1:])
