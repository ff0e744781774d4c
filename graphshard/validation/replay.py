"""Runs what `reproducer` has written."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import Graph

from graphshard.graph.ir import output_args
from graphshard.validation.differences import first_difference, result_names
from graphshard.validation.lockstep import LockStep, alone
from graphshard.validation.markers import Reductions
from graphshard.validation.world import World


def replay(folder: Path) -> int:
    """Runs both graphs of a folder; says what differs. Returns 1 where something does, else 0.

    The folder holds code: run none that you would not run as a script.
    """
    data = torch.load(folder / "inputs.pt", weights_only=True)
    parts = {name: runpy.run_path(str(folder / f"{name}.py")) for name in ("before", "after")}
    lines = [parts["after"]["says"]]
    want, status = data["want"], 0
    for name in ("before", "after") if parts["before"]["reruns_before"] else ("after",):
        got = _run(parts[name], data[name], data["constants"])
        names = result_names(output_args(got[1]))
        found = first_difference(got[0], want, names, parts[name]["sameness"], torch.bfloat16)
        lines.append(f"{name} the pass: {found or 'as wanted'}")
        status = int(found is not None)
    sys.stdout.write("\n".join([*lines, ""]))
    return status


def _run(part: dict[str, Any], inputs: dict[str, list[Any]], constants: dict[str, Any]) -> tuple[list[Any], Graph]:
    owner = nn.Module()
    for name, value in constants.items():
        setattr(owner, name, value)
    graph = Graph(owning_module=owner)  # type: ignore[arg-type]
    part["build"](graph)
    world = World(part["ranks"], part["groups"])
    with alone(), torch.no_grad():
        given = [inputs[node.name] for node in graph.find_nodes(op="placeholder")]
        return LockStep(Reductions(part["ctx"], world, dict(inputs))).run(graph, given), graph
