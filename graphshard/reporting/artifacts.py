"""What comes to be while programs are made, for those who look: dumps (``GRAPHSHARD_DUMP``), torch's structured trace
(``TORCH_TRACE``) and observers. Where nobody looks, no text is made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

import torch.distributed as dist
from torch.fx import Graph

from graphshard import env
from graphshard.compat.structured_trace import trace_artifact
from graphshard.files import make_private, write_private
from graphshard.graph.printer import format_graph
from graphshard.reporting.report import ProgramRecord, Report

# Names of classes and modules are users', and may be anything.
_NO_FILE_NAME = re.compile(r"[/\\\0]|^\.+")


class Snapshot(NamedTuple):
    """A graph as a pass has left it.

    Attributes:
        title: of the graph: model, region, number and direction of a program, or part of a capture.
        number: place of the pass in its order; 0: no pass has run.
        step: name of the pass, ``"captured"`` of none.
        edit: what it has decided, in words.
        text: the graph, a line for each node.
    """

    title: str
    number: int
    step: str
    edit: str
    text: str


class Observer(Protocol):
    """Who is told, in whatever thread compiles."""

    def graph(self, snapshot: Snapshot) -> None:
        """A graph after a pass, or before all."""

    def program(self, model: str, title: str, record: ProgramRecord, report: Report) -> None:
        """A program that is compiled, of a model of that name. Its graphs had that title."""


# Of the process: a backward is compiled in a thread of autograd's.
_observers: list[Observer] = []


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Inside, `observer` is told."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def show_graph(graph: Graph, title: str, number: int, step: str, edit: object = "") -> None:
    """Shows a graph to those who look; see `Snapshot`."""

    @cache
    def text() -> str:
        return format_graph(graph)

    @cache
    def with_edit() -> str:
        said = str(edit)
        return (f"# {said}\n" if said else "") + text()

    if (directory := env.dump_dir()) is not None:
        _dump(directory, f"{title}.{number}.{step}.ir", with_edit())
    for observer in tuple(_observers):
        observer.graph(Snapshot(title, number, step, str(edit), text()))
    trace_artifact(f"graphshard_{title}_{number}_{step}", with_edit)


def show_program(model: str, title: str, record: ProgramRecord, report: Report, plan: Callable[[], str]) -> None:
    """Shows a program that is compiled.

    Args:
        model: its model's name.
        title: of its graphs.
        record: of the program.
        report: of the model, with `record`.
        plan: returns what was planned for it, in words.
    """
    for observer in tuple(_observers):
        observer.program(model, title, record, report)
    if record.decision is not None:
        trace_artifact(f"graphshard_{title}_plan", plan)
    trace_artifact(f"graphshard_{title}_report", lambda: f"{report}\n")


def rank_folder(directory: Path) -> Path:
    """Where this rank writes below a folder that all ranks have."""
    return directory / f"rank{dist.get_rank()}" if dist.is_initialized() else directory


def _dump(directory: Path, name: str, text: str) -> None:
    directory = rank_folder(directory)
    make_private(directory)
    write_private(directory / _NO_FILE_NAME.sub("_", name), text)
