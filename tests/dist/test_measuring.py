"""`graphshard.measure`: launches and waits of real steps, beside those that were predicted."""

from __future__ import annotations

from typing import Any

import models
import pytest
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
