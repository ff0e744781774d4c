"""`graphshard.measure`: launches and waits of real steps, beside those that were predicted."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import profile

import graphshard
from graphshard.testing import WorkerPool


def measured_steps() -> None:
    model: Any = graphshard.compile(models.Decoder(), init_device_mesh("cpu", (2,)), backend="aot_eager", plan="fsdp2")

    def step() -> None:
        model(*models.tokens(0, 0)).square().mean().backward()

    step()
    assert "measured launch" not in str(graphshard.explain(model))
    with graphshard.measure(model):
        for _ in range(3):
            step()
    assert "measured launch" in str(graphshard.explain(model))
    for record in graphshard.report(model).programs:
        buckets = {bucket for what, bucket in record.order if what == "launch"}
        assert record.timings.keys() == buckets, record.direction
        assert all(0.0 < t.launch_us < t.done_us and t.waited_us > 0.0 for t in record.timings.values())
    with profile() as outer:
        message = "measure: got one inside a torch profiler, want one at a time"
        with pytest.raises(RuntimeError, match=message), graphshard.measure(model):
            pass
        step()
    assert any("allgather" in event.key for event in outer.key_averages())  # it has gone on
    again = pytest.raises(RuntimeError, match="measure: got one inside another")
    with graphshard.measure(model), again, graphshard.measure(model):
        pass


def test_launches_and_waits_of_steps_are_measured(two_ranks: WorkerPool) -> None:
    two_ranks.run(measured_steps)


def named_units(backend: str, regions: str) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    model: Any = graphshard.compile(models.Decoder(), mesh, backend=backend, regions=regions, plan="fsdp2")

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(*models.tokens(0, 0)).square().mean().backward()
        return [param.grad.full_tensor() for param in model.parameters()]

    unnamed = gradients()
    with profile() as profiler:
        named = gradients()
    assert all(map(torch.equal, unnamed, named))
    events = [event for event in profiler.events() or () if event.name.startswith("graphshard: ")]
    order: dict[str, list[str]] = {"forward": [], "backward": []}
    for event in sorted(events, key=lambda event: event.time_range.start):
        direction, _, unit = event.name.removeprefix("graphshard: ").partition(" of ")
        if direction in order and not unit.startswith("region"):
            order[direction] += [unit for unit in unit.split("..") if unit not in order[direction][-1:]]
    layers = [f"layers.{number}" for number in range(3)]
    assert order["forward"] == ["root", *layers, "root"]
    assert [unit for unit in order["backward"] if unit != "root"] == layers[::-1]
    runs = [event for event in events if " of region " in event.name]
    for event in events:  # ranges lie inside the run of a program, whatever that is left by
        if event.name.startswith(("graphshard: forward of", "graphshard: backward of")) and event not in runs:
            start, end = event.time_range.start, event.time_range.end
            assert any(run.time_range.start <= start and end <= run.time_range.end for run in runs), event.name


@pytest.mark.parametrize(("backend", "regions"), [("aot_eager", "model"), ("inductor", "unit")])
def test_what_is_computed_of_each_unit_bears_its_name_in_a_trace(
    two_ranks: WorkerPool, backend: str, regions: str
) -> None:
    two_ranks.run(named_units, backend, regions)
