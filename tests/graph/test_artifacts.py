"""Who looks while programs are made is shown graphs: dumps, torch's structured trace, loggers; others cost nothing."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pkgutil
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import graphshard
from graphshard.compat.structured_trace import TracedCompile
from graphshard.lowering import driver
from graphshard.reporting.artifacts import Snapshot, observed_by, show_graph
from tests.graph.graphs import toy_forward, toy_weights

ROOT = Path(__file__).resolve().parents[2]
STEPS = """
import logging, os, sys
if sys.argv[1] == "configured":
    logging.basicConfig(level=logging.DEBUG, format="%(levelname)s %(name)s %(message)s")
import torch
from torch import nn
from torch.distributed import init_process_group, destroy_process_group
from torch.distributed.device_mesh import init_device_mesh
import graphshard
init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=0, world_size=1)
model = graphshard.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), init_device_mesh("cpu", (1,)),
                           backend="aot_eager", units=["0"])
for synchronizes in (True, False):
    model.set_requires_gradient_sync(synchronizes)
    model(torch.ones(2, 4)).sum().backward()
destroy_process_group()
"""


def lower(title: str = "program") -> driver.Lowered:
    marked = toy_forward(toy_weights())
    return driver.lower(marked.gm, marked.ctx, title)


class Ran(NamedTuple):
    lines: list[str]
    trace: list[tuple[dict[str, Any], str]]


def ran(folder: Path, how: str, **variables: str) -> Ran:
    """What two steps of a process of its own say, and what is in its trace: (record, payload)."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_")}
    environment |= {"PYTHONPATH": str(ROOT), "TORCH_TRACE": str(folder / "trace"), **variables}
    command = [sys.executable, "-c", STEPS, how, str(folder / "store")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    (file,) = (folder / "trace").iterdir()
    records: list[tuple[dict[str, Any], list[str]]] = []
    for line in file.read_text().splitlines():
        if line.startswith("\t"):  # of the payload of the record before
            records[-1][1].append(line[1:])
        else:
            records.append((json.loads(line[line.index("] {") + 2 :]), []))
    return Ran(done.stderr.splitlines(), [(record, "\n".join(payload)) for record, payload in records])


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return ran(tmp_path_factory.mktemp("traced"), "plain", TORCH_LOGS="+graphshard")


def test_torch_logs_shows_all_rooms_each_line_once(traced: Ran) -> None:
    ours = [line for line in traced.lines if "graphshard: " in line]
    assert len(ours) == len(set(ours)) > 5
    said = "\n".join(ours)
    for place, line in (
        ("runtime/backend.py", "Sequential0.region0: captured, "),
        ("lowering/driver.py", "Sequential0.region0.0.forward: pass insert_collectives: CollectivesEdit"),
        ("runtime/region_lowering.py", "Sequential0.region0.1.backward: passes "),
    ):
        assert re.search(rf"{place}:\d+\] (\[.*?\] )?graphshard: {re.escape(line)}", said), (place, line, said)


def test_configured_logging_gets_each_line_once_from_the_room_that_says_it(tmp_path: Path) -> None:
    lines = ran(tmp_path, "configured").lines
    ours = [line for line in lines if re.match(r"(INFO|DEBUG|WARNING) graphshard\.", line)]
    assert len(ours) == len(set(ours)) > 5 and sum("graphshard: " in line for line in lines) == len(ours)
    assert any(line.startswith("INFO graphshard.runtime.region_lowering graphshard: Sequential0") for line in ours)
    assert any(line.startswith("DEBUG graphshard.lowering.driver graphshard: Sequential0") for line in ours)


def test_trace_has_graphs_plans_and_reports_as_artifacts_of_their_compilation(traced: Ran) -> None:
    found = {
        record["artifact"]["name"]: (record, payload)
        for record, payload in traced.trace
        if record.get("artifact", {}).get("name", "").startswith("graphshard_")
    }
    titles = ("region0.captured_0_captured", "region0.0.forward_0_captured", "region0.0.forward_7_insert_collectives")
    late = ("region0.2.backward_3_apply_flags", "region0.2.backward_report")  # lowered when Dynamo had long been done
    for name in (*titles, *late, "region0.0.forward_report"):
        record, payload = found[f"graphshard_Sequential0.{name}"]
        assert record["artifact"]["encoding"] == "string"
        assert (record["frame_id"], record["frame_compile_id"]) == (0, 0), name
        assert record["has_payload"] == hashlib.md5(payload.encode(), usedforsecurity=False).hexdigest()
    assert "unshard(" in found["graphshard_Sequential0.region0.0.forward_0_captured"][1]
    assert found["graphshard_Sequential0.region0.0.forward_7_insert_collectives"][1].startswith("# CollectivesEdit(")
    assert "1 regions, 3 programs" in found["graphshard_Sequential0.region0.2.backward_report"][1]


def test_each_module_has_a_logger_of_its_name_and_configures_nothing() -> None:
    loggers = {}
    for module in pkgutil.walk_packages(graphshard.__path__, "graphshard."):
        if not module.name.endswith("__main__") and isinstance(
            found := getattr(import_module(module.name), "log", None), logging.Logger
        ):
            loggers[module.name] = found
    assert {"graphshard.lowering.driver", "graphshard.planning.planning", "graphshard.reporting.report"} <= set(loggers)
    assert {name: log.name for name, log in loggers.items()} == {name: name for name in loggers}
    family = [logging.getLogger("graphshard"), *loggers.values()]
    assert all(not log.handlers and log.propagate and not log.filters for log in family)


class Observer:
    def __init__(self) -> None:
        self.seen: list[Snapshot] = []

    def graph(self, snapshot: Snapshot) -> None:
        self.seen.append(snapshot)

    def program(self, *made: object) -> None:
        raise AssertionError(made)


def test_observer_sees_a_graph_before_all_passes_and_behind_each() -> None:
    observer = Observer()
    with observed_by(observer):
        lowered = lower("title")
    lower("title")
    steps = [(snapshot.number, snapshot.step) for snapshot in observer.seen]
    assert steps[0] == (0, "captured") and [step for _, step in steps[1:]] == [name for name, _ in lowered.edits]
    assert "unshard(" in observer.seen[0].text and "unshard(" not in observer.seen[-1].text
    assert observer.seen[-1].edit == str(lowered.edits[-1][1])


def test_where_nobody_looks_no_text_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def unasked(graph: object) -> str:
        raise AssertionError("a graph was written")

    monkeypatch.delenv("GRAPHSHARD_DUMP", raising=False)
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "handlers", [])
    monkeypatch.setattr("graphshard.reporting.artifacts.format_graph", unasked)
    lower()
    with observed_by(Observer()), pytest.raises(AssertionError, match="was written"):
        lower()


def test_dump_of_a_hostile_name_stays_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHSHARD_DUMP", str(tmp_path / "dumps"))
    for title in ("../../above", "/etc/absolute", "model.unshard.a/b", "back\\slash", "nul\0"):
        show_graph(toy_forward(toy_weights()).graph, title, 0, "captured")
    assert [path.name for path in tmp_path.iterdir()] == ["dumps"]
    files = list((tmp_path / "dumps").iterdir())
    assert len(files) == 5 and all(path.is_file() and not path.name.startswith(".") for path in files)


def test_compilation_is_resumed_only_where_none_runs() -> None:
    from torch._guards import CompileContext, CompileId, compile_context

    first, second = (CompileContext(CompileId(frame_id=number, frame_compile_id=0)) for number in (1, 2))
    with compile_context(first):
        traced = TracedCompile.running()
    with traced.resumed():
        assert CompileContext.try_get() is first
    with compile_context(second), traced.resumed():
        assert CompileContext.try_get() is second
    with TracedCompile.running().resumed():
        assert CompileContext.try_get() is None


def test_passes_say_what_they_decide(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger=driver.__name__):
        lowered = lower("title")
    ours = [record.getMessage() for record in caplog.records if record.name == driver.__name__]
    assert all(len(str(edit)) < 2000 for _, edit in lowered.edits)
    assert ours == [f"graphshard: title: pass {name}: {edit}" for name, edit in lowered.edits]
