"""Launches, waits and matrix products come in Inductor's generated code in the order that the passes decided."""

from __future__ import annotations

import re
from typing import Any

import models
import torch
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.testing import WorkerPool

EVENTS = {
    "all_gather_into_tensor": "gather",
    "all_gather_into_tensor_out": "gather",
    "reduce_scatter_tensor": "scatter",
    "wait_tensor": "wait",
    "addmm": "compute",
    "mm": "compute",
    "bmm": "compute",
}


def events_in_ir(ir: str) -> list[str]:
    calls = (re.search(r"= (\w+)\(", line) for line in ir.splitlines())
    return [EVENTS[call[1]] for call in calls if call and call[1] in EVENTS]


def events_in_code(code: str) -> list[str]:
    pattern = r"^\s+(?:.* = )?(?:torch\.ops\._c10d_functional\.|extern_kernels\.|(?=body_))(\w+)(?:\.default)?\("
    program, *bodies = re.split(r"^# (body_\d+)$", code, flags=re.MULTILINE)
    in_bodies = {
        name: re.findall(pattern, text, re.MULTILINE) for name, text in zip(bodies[::2], bodies[1::2], strict=True)
    }
    calls = [inside for call in re.findall(pattern, program, re.MULTILINE) for inside in in_bodies.get(call, [call])]
    assert "all_gather_into_tensor" not in calls, "over gloo, gathers need outputs"
    return [EVENTS[call] for call in calls if call in EVENTS]


def orders(plan: str) -> list[tuple[str, list[str], list[str]]]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    model: Any = graphshard.compile(models.mlps(3), mesh, plan=plan, reshard_after_forward=True)
    x = models.features(0, torch.distributed.get_rank())
    model.set_requires_gradient_sync(False)
    model(*x).square().mean().backward()
    model.set_requires_gradient_sync(True)
    model(*x).square().mean().backward()
    with torch.no_grad():
        model(*x)
    programs = graphshard.report(model).programs
    return [(p.direction, events_in_ir(p.ir), events_in_code(p.code or "")) for p in programs]


def test_generated_code_keeps_the_order_of_a_plan(two_ranks: WorkerPool) -> None:
    for programs in two_ranks.run(orders, "auto"):
        assert len(programs) == 4
        for direction, in_ir, in_code in programs:
            assert in_code == in_ir, direction
            assert "gather" in in_ir and "compute" in in_ir
    forward = programs[0][1]
    # A second gather is under way while the first one is awaited, which FSDP2's order never has.
    assert forward[:3] == ["gather", "gather", "wait"]


def test_generated_code_keeps_the_order(two_ranks: WorkerPool) -> None:
    for programs in two_ranks.run(orders, "fsdp2"):
        assert [direction for direction, _, _ in programs] == ["forward", "backward", "backward", "inference"]
        for direction, in_ir, in_code in programs:
            assert in_code == in_ir, direction
    forward, unreduced, reduced, inference = (in_ir for _, in_ir, _ in programs)
    # The second gather is launched when the first has arrived, before any compute; the others one unit ahead.
    assert forward[:4] == inference[:4] == ["gather", "wait", "gather", "wait"]
    assert forward[4] == inference[4] == "gather"
    assert "scatter" not in unreduced and unreduced.count("gather") == 3
    # A reduce-scatter is awaited when the next one is launched, with compute between.
    first, second = [i for i, event in enumerate(reduced) if event == "scatter"][:2]
    assert "compute" in reduced[first + 1 : second] and reduced[second - 1] == "wait"
