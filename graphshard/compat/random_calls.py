"""Operators that torch has run with the state of random numbers, so that a checkpoint draws the same ones again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch._prims.rng_prims import graphsafe_run_with_rng_state, run_and_save_rng_state, run_with_rng_state
from torch._subclasses import FakeTensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from graphshard.compat.tensors import fake_mode_of

# Where the operator stands among the arguments.
_RUNS = {run_and_save_rng_state: 0, graphsafe_run_with_rng_state: 0, run_with_rng_state: 1}


class Call(NamedTuple):
    """What a node calls, with its arguments."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def argument(self, name: str) -> Any:
        """The argument of that name, or its default; None if the operator has none."""
        schema = getattr(self.target, "_schema", None)
        for place, argument in enumerate(schema.arguments if schema else ()):
            if argument.name == name:
                given = self.kwargs.get(name, argument.default_value)
                return self.args[place] if place < len(self.args) else given
        return None


def call_of(node: Node) -> Call:
    """The operator that a node calls: its target, or what that runs with the state of random numbers."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator) or (place := _RUNS.get(node.target)) is None:
        return Call(node.target, node.args, node.kwargs)
    kwargs = {name: value for name, value in node.kwargs.items() if name != "rng_state"}
    return Call(node.args[place], node.args[place + 1 :], kwargs)


def can_draw(node: Node) -> bool:
    """Whether torch counts what a node calls among the operators that draw random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def give_values(graph: Graph) -> None:
    """Gives such nodes their fake values, which the partitioner leaves out (torch 2.13)."""
    values = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
    if (mode := next((fake_mode_of(value) for value in values if isinstance(value, FakeTensor)), None)) is None:
        return
    for node in graph.nodes:
        if "val" in node.meta or (call := call_of(node)).target is node.target:
            continue
        if node.target is run_and_save_rng_state:
            parts = {part.args[1]: part.meta["val"] for part in node.users}
            node.meta["val"] = (parts.get(0), parts.get(1))
        elif all("val" in source.meta for source in node.all_input_nodes):
            args, kwargs = map_arg((call.args, call.kwargs), lambda source: source.meta["val"])
            with mode, torch.no_grad():
                node.meta["val"] = call.target(*args, **kwargs)
