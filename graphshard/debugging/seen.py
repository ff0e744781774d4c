"""What was seen of models: graphs after passes, programs and how often they ran."""

from __future__ import annotations

from dataclasses import dataclass, field

from graphshard.reporting.artifacts import Snapshot
from graphshard.reporting.report import ProgramRecord, Report
from graphshard.runtime.engine import model_contexts
from graphshard.state.model_context import ModelContext


@dataclass(frozen=True)
class SeenGraph:
    """A graph on its way through passes.

    Attributes:
        title: see `Snapshot`.
        steps: as it came, and as each pass left it that did something.
        attempts: how often it was lowered; `steps` are those of the program that runs, as far as one does.
    """

    title: str
    steps: tuple[Snapshot, ...]
    attempts: int = 1


@dataclass(frozen=True)
class SeenProgram:
    """A program.

    Attributes:
        title: of its graph, ``""`` if it was compiled before anyone looked.
        record: of it.
        runs: how often it ran inside.
    """

    title: str
    record: ProgramRecord
    runs: int


@dataclass
class SeenModel:
    """One model.

    Attributes:
        context: of the model.
        programs: all that it has.
        graphs: that were seen, in order.
    """

    context: ModelContext
    programs: list[SeenProgram] = field(default_factory=list)
    graphs: list[SeenGraph] = field(default_factory=list)


class Seen:
    """An observer (`reporting.artifacts`) that keeps what it is told until it is asked."""

    def __init__(self) -> None:
        self._contexts = {context.name: context for context in model_contexts()}
        self._runs = {
            id(record): (record, record.runs) for context in self._contexts.values() for record in _records(context)
        }
        self._attempts: dict[str, list[list[Snapshot]]] = {}
        self._titles: dict[int, str] = {}  # by record

    def graph(self, snapshot: Snapshot) -> None:
        """A graph after a pass; before all of them, another attempt begins."""
        attempts = self._attempts.setdefault(snapshot.title, [])
        if not attempts or snapshot.number == 0:
            attempts.append([])
        attempts[-1].append(snapshot)

    def program(self, model: str, title: str, record: ProgramRecord, report: Report) -> None:
        """A program."""
        self._titles[id(record)] = title
        self._find_contexts()  # the model may be deleted before it is asked for
        attempts = self._attempts.get(title, [])
        # The last one that has led to this program: ranks may decide otherwise than this one tried at last.
        for attempt in reversed(attempts):
            if attempt[-1].text == record.ir:
                attempts.remove(attempt)
                attempts.append(attempt)
                return

    def models(self) -> list[SeenModel]:
        """Models of which programs were made or ran inside."""
        return [model for model in self._all() if model.graphs or any(program.runs for program in model.programs)]

    def elsewhere(self) -> list[str]:
        """Names of the other compiled models."""
        shown = {model.context.name for model in self.models()}
        return [name for name in self._contexts if name not in shown]

    def _all(self) -> list[SeenModel]:
        self._find_contexts()
        models = {name: SeenModel(context) for name, context in self._contexts.items()}
        for title, attempts in self._attempts.items():
            names = [name for name in models if title.startswith(f"{name}.")]
            if names:
                found = SeenGraph(title, tuple(attempts[-1]), len(attempts))
                models[max(names, key=len)].graphs.append(found)
        for model in models.values():
            for record in _records(model.context):
                _, before = self._runs.get(id(record), (record, 0))
                runs = record.runs - before if record.runs >= before else record.runs  # counts were reset inside
                model.programs.append(SeenProgram(self._titles.get(id(record), ""), record, runs))
        return list(models.values())

    def _find_contexts(self) -> None:
        for context in model_contexts():
            self._contexts.setdefault(context.name, context)


def _records(context: ModelContext) -> list[ProgramRecord]:
    return list(context.report.programs)
