"""What `graphshard.compile` was asked to plan with: its arguments, checked, and what they leave to the machine."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist

from graphshard import env
from graphshard.compat.groups import resolve_process_group, takes_several_tensors
from graphshard.cost import CollectiveKind, CostModel, GroupShape, find_hardware, group_shape
from graphshard.plan_file import Plan, load_plan
from graphshard.planning.extraction import Scene
from graphshard.planning.planning import Planning

PLANS = ("auto", "fsdp2")
# Also where a G is in front: what is soldered to a CPU (GH200).
_ACCELERATORS = re.compile(r"\bG?(A100|H100|H200|B200)\b")
# The row for all that the table lacks.
OTHERS = "h100"


def make_planning(
    plan: str | os.PathLike[str] | Plan,
    memory_budget: int | float | None,
    hardware: str | None,
    device_type: str,
    fused: bool,
    keeps: bool,
) -> Planning:
    """What `graphshard.compile` plans with.

    Args:
        plan: one of `PLANS`, or plans to replay, or the path of their file.
        memory_budget: most that a program may allocate: bytes, or a share, in (0, 1], of a rank's memory; None: what
            the file says, or nothing.
        hardware: name of a row of the hardware table, or path of a calibration; None: found by the device.
        device_type: that the model runs on.
        fused: whether Inductor compiles the programs.
        keeps: whether the planner decides which units stay gathered.

    Raises:
        TypeError: `memory_budget` is no number, or `hardware` no text.
        ValueError: an argument is not one of those above.
    """
    if not isinstance(hardware, str | os.PathLike | None):
        raise TypeError(f"compile: hardware: got {hardware!r:.80}, want a name of the hardware table, a path, or None")
    machine = find_hardware(detect_hardware(device_type) if hardware is None else hardware)
    budget_bytes = None if memory_budget is None else _budget_bytes(memory_budget, machine.memory_bytes)
    if plan == "fsdp2" and budget_bytes is not None:
        raise ValueError(
            f"compile: memory_budget: got {memory_budget} with plan='fsdp2', whose schedules are FSDP2's whatever they "
            "allocate; want plan='auto', or no memory_budget"
        )

    def scene(mode: str) -> Scene:
        shapes = _group_shape(machine.ranks_per_node)
        return Scene(CostModel(machine, fused), shapes, _coalesces(mode, device_type))

    if isinstance(plan, str) and plan in PLANS:
        return Planning(scene(plan), plan, budget_bytes, keeps)
    if isinstance(plan, Plan):
        stored, stored_in = plan, "compile: plan"
    else:
        stored, stored_in = load_plan(plan), f"plan file {os.fspath(plan)}"
    if budget_bytes is None:
        budget_bytes = stored.budget_bytes
    return Planning(scene(stored.mode), stored.mode, budget_bytes, keeps, stored=stored, stored_in=stored_in)


def check_plan(plan: object) -> None:
    """Refuses what cannot be a plan.

    Raises:
        TypeError: it is neither text, nor a path, nor plans.
        ValueError: it is other text.
    """
    want = f"want one of {', '.join(map(repr, PLANS))}, the path of a .json file, or a graphshard.Plan"
    if not isinstance(plan, (str, os.PathLike, Plan)):
        raise TypeError(f"compile: plan: got {type(plan).__name__}, {want}")
    if isinstance(plan, str) and plan not in PLANS and not plan.endswith(".json"):
        raise ValueError(f"compile: plan: got {plan!r}, {want}")


def detect_hardware(device_type: str) -> str:
    """The row of the hardware table for the device that this process runs on: `OTHERS` for one that it lacks."""
    if device_type == "cpu":
        return "cpu-gloo"
    found = _ACCELERATORS.search(_device_name(device_type))
    return OTHERS if found is None else found[1].lower()


def device_without_row(device_type: str) -> str:
    """The name of the device that this process runs on, if the hardware table lacks it; else ``""``."""
    name = _device_name(device_type)
    return "" if _ACCELERATORS.search(name) else name


def _device_name(device_type: str) -> str:
    return torch.cuda.get_device_name() if device_type == "cuda" and torch.cuda.is_available() else ""


def _budget_bytes(memory_budget: int | float, memory_bytes: int) -> int:
    if isinstance(memory_budget, bool) or not isinstance(memory_budget, (int, float)):
        raise TypeError(f"compile: memory_budget: got {memory_budget!r:.80}, want bytes, a share of memory or None")
    if isinstance(memory_budget, float) and 0.0 < memory_budget <= 1.0:
        return max(1, int(memory_budget * memory_bytes))
    if not math.isfinite(memory_budget) or memory_budget < 1 or memory_budget != int(memory_budget):
        raise ValueError(
            f"compile: memory_budget: got {memory_budget}, want bytes, as an int, or a share in (0, 1] of a rank's "
            "memory, as a float"
        )
    return int(memory_budget)


def _group_shape(ranks_per_node: int) -> Callable[[str], GroupShape]:
    @cache
    def shape(name: str) -> GroupShape:
        ranks = dist.get_process_group_ranks(resolve_process_group(name))
        return group_shape(ranks, ranks_per_node)

    return shape


def _coalesces(mode: str, device_type: str) -> Callable[[str, CollectiveKind], bool]:
    @cache
    def coalesces(group: str, kind: CollectiveKind) -> bool:
        # In which order a sum is made is a matter of its place in a buffer, and FSDP2's plan promises its bits.
        if (kind == "reduce_scatter" and mode == "fsdp2") or env.is_disabled("choose_copies"):
            return False
        return takes_several_tensors(resolve_process_group(group), device_type)

    return coalesces
