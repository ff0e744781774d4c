"""The pass that CONTRIBUTING.md writes works as it stands there."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from graphshard import passes
from graphshard.graph.printer import format_graph
from graphshard.lowering import driver
from graphshard.passes import Pass
from tests.graph.graphs import GraphBuilder, Marked, Weight

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()


@pytest.fixture
def worked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pass]:
    """The pass, made by the text's own lines."""
    source, entry = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(source.splitlines()) <= 60
    module = types.ModuleType("share_transposes")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # a dataclass looks its module up
    exec(compile(source, "CONTRIBUTING.md", "exec"), module.__dict__)
    (step,) = eval(entry, {"Pass": Pass, module.__name__: module})
    yield step


def tied() -> Marked:
    weight = Weight("embedding", (4, 3))
    build = GraphBuilder("inference")
    x, full = build.input("x", [2, 3]), build.unshard(weight)
    logits = build.call(torch.ops.aten.mm.default, x, build.call(torch.ops.aten.t.default, full))
    other = build.call(torch.ops.aten.mm.default, x, build.call(torch.ops.aten.t.default, full))
    return build.finish(build.call(torch.ops.aten.add.Tensor, logits, other))


def test_worked_pass_keeps_what_passes_promise(worked: Pass) -> None:
    marked = tied()
    before = format_graph(marked.graph)
    edit = worked.decide(marked.graph, marked.ctx)
    assert edit and format_graph(marked.graph) == before
    hash(edit)
    worked.apply(marked.graph, edit)
    assert len(marked.calls(torch.ops.aten.t.default)) == 1
    assert not worked.decide(marked.graph, marked.ctx)


def test_worked_pass_runs_in_the_pipeline(worked: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    place = 1 + next(i for i, step in enumerate(passes.PROGRAM) if step.name == "apply_residency")
    steps = (*passes.PROGRAM[:place], worked, *passes.PROGRAM[place:])
    monkeypatch.setattr(driver, "PROGRAM", steps)
    marked = tied()
    lowered = driver.lower(marked.gm, marked.ctx, "contributing")
    assert worked.name in dict(lowered.edits)
    assert len(lowered.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.t.default)) == 1
