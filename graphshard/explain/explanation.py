"""What was planned, and why: the value of `graphshard.explain`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from graphshard.explain.chrome_trace import chrome_trace
from graphshard.explain.drawing import drawing
from graphshard.explain.facts_json import facts_json
from graphshard.explain.markup import framed
from graphshard.explain.page import page
from graphshard.explain.plain_text import plain_text, summary_text
from graphshard.explain.program import PlannedProgram


@dataclass(frozen=True)
class Explanation:
    """Planned programs, on paper. `print` shows it as text, `save` writes it to a file.

    Attributes:
        programs: in order.
        hardware: that the prediction is for, in words.
        notes: one sentence each, about what is not as a reader expects.
    """

    programs: tuple[PlannedProgram, ...]
    hardware: str
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.to_text().rstrip("\n")

    __repr__ = __str__

    def to_text(self, top: int = 5) -> str:
        """Plain text with aligned columns.

        Args:
            top: how many of the longest waits of each program to explain.
        """
        return plain_text(self.programs, self.hardware, self.notes, top)

    def to_summary(self) -> str:
        """A table with one line for each program."""
        return summary_text(self.programs)

    def to_json(self) -> str:
        """All numbers: the same text for the same plan."""
        return facts_json(self.programs, self.hardware, self.notes)

    def to_chrome_trace(self) -> str:
        """A timeline for Perfetto (ui.perfetto.dev) or ``chrome://tracing``."""
        return chrome_trace(self.programs, self.hardware, self.notes)

    def to_html(self) -> str:
        """One page that needs no network: timelines to zoom into, and every table in full."""
        return page(self.programs, self.hardware, self.notes)

    def _repr_html_(self) -> str:
        """The page in a notebook, in a frame: its styles and its script see nothing else."""
        return framed(self.to_html(), "graphshard plan")

    def to_svg(self) -> str:
        """The timelines alone, as a picture."""
        return drawing(self.programs, self.hardware)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it in the form that the suffix asks for.

        Args:
            path: ``.html``: the page. ``.json``: the trace. ``.svg``: the picture. ``.txt``: the text.

        Raises:
            TypeError: no path.
            ValueError: another suffix.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"save: path: got {type(path).__name__}, want the path of a file")
        forms = {
            ".html": self.to_html,
            ".json": self.to_chrome_trace,
            ".svg": self.to_svg,
            ".txt": self.to_text,
        }
        suffix = Path(path).suffix.lower()
        if suffix not in forms:
            raise ValueError(f"save: path: got suffix {suffix!r} in {str(path)!r}, want one of {', '.join(forms)}")
        Path(path).write_text(forms[suffix](), encoding="utf-8")
