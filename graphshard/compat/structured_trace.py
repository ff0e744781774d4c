"""Torch's structured trace (``TORCH_TRACE``), which tlparse reads: texts of ours in it, beside those of torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch._guards import CompileContext, compile_context
from torch._logging._internal import trace_structured

# A reader makes a file of each artifact, by its name.
_NO_FILE_NAME = re.compile(r"[^\w.-]", re.ASCII)


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Puts a text into the trace, for what torch compiles at the moment; without a trace, `text` is not asked.

    Args:
        name: of the artifact.
        text: returns it.
    """
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": _NO_FILE_NAME.sub("_", name), "encoding": "string"},
        payload_fn=text,
        expect_trace_id=False,  # whole units are gathered by programs that torch knows nothing of
    )


@dataclass(frozen=True)
class TracedCompile:
    """Which of torch's compilations something belongs to, long after it is over: in a trace, by its id."""

    context: Any

    @staticmethod
    def running() -> TracedCompile:
        """That which runs now, if one does."""
        return TracedCompile(CompileContext.try_get())

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Inside, texts are put under it, unless another one runs."""
        if self.context is None or CompileContext.try_get() is not None:
            yield
            return
        with compile_context(self.context):
            yield
