"""What this process compiles, on the terminal of rank 0 where it takes more than a few seconds."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

import torch.distributed as dist

if TYPE_CHECKING:
    from rich.progress import Progress as Display
    from rich.progress import TaskID

log = logging.getLogger(__name__)

PATIENCE_S = 3.0


class Progress:
    """A line with what is compiled, k of n, and the seconds; it is gone when all is compiled.

    There is none where `file` is no terminal or a dumb one, on ranks but 0, and without rich.

    Args:
        file: where to; None: standard error.
        patience_s: for so many seconds nothing is shown.
    """

    def __init__(self, file: TextIO | None = None, patience_s: float = PATIENCE_S) -> None:
        self._file = file
        self._patience_s = patience_s
        self._lock = threading.Lock()  # the line appears in a thread of its own: Dynamo traces for long in one call
        self._running: list[str] = []
        self._counted = (0, 0)
        self._timer: threading.Timer | None = None
        self._display: Display | None = None
        self._line: TaskID | None = None

    def begin(self, what: str) -> None:
        """Something is compiled from now on; inside what was begun before."""
        with self._lock:
            self._running.append(what)
            self._counted = (0, 0)
            if len(self._running) == 1 and self._is_wanted():
                self._timer = threading.Timer(self._patience_s, self._show)
                self._timer.daemon = True
                self._timer.start()
            self._update()

    def count(self, done: int, total: int) -> None:
        """How much of what was begun last is compiled."""
        with self._lock:
            self._counted = (done, total)
            self._update()

    def end(self) -> None:
        """What was begun last is compiled."""
        with self._lock:
            if self._running:
                self._running.pop()
            self._counted = (0, 0)
            self._update()
            if self._running:
                return
            timer, display = self._timer, self._display
            self._timer = self._display = self._line = None
            if timer is not None:
                timer.cancel()
            if display is not None:
                with _never_in_the_way():
                    display.stop()

    def _is_wanted(self) -> bool:
        if dist.is_initialized() and dist.get_rank() != 0:
            return False
        file = sys.stderr if self._file is None else self._file
        with suppress(Exception):  # whatever stands in its place
            return file.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
        return False

    def _show(self) -> None:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Display
        except ImportError:
            return
        with self._lock, _never_in_the_way():
            if not self._running or self._timer is not threading.current_thread():
                return
            display = Display(
                TextColumn("{task.description}"), BarColumn(20), TimeElapsedColumn(),
                console=Console(file=self._file, stderr=True), transient=True,
                redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip
            self._line = display.add_task("", total=None)
            task = display.tasks[0]
            task.start_time = task.get_time() - self._patience_s
            self._display = display
            self._update()
            display.start()

    def _update(self) -> None:
        if self._display is not None and self._line is not None and self._running:
            done, total = self._counted
            counted = f": {done} of {total}" if total else ""
            text = self._running[-1] + counted
            with _never_in_the_way():
                self._display.update(self._line, description=text, completed=done, total=total or None)


@contextmanager
def _never_in_the_way() -> Iterator[None]:
    """A terminal that is gone ends no training: rich leaves the program where a pipe is broken."""
    try:
        yield
    except (Exception, SystemExit) as error:
        log.debug("graphshard: progress: %s", error)


# Of this process.
progress = Progress()
