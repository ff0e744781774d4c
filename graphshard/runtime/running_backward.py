"""The backward that runs now: what is done when it ends, and what of it is put off for a pipeline's schedule."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable

from graphshard.compat.autograd import backward_id, call_at_end_of_backward
from graphshard.compat.dynamo import uncaptured
from graphshard.fsdp2 import Unit
from graphshard.reporting.report import Report
from graphshard.state.calls import LiveCalls
from graphshard.state.unit_reductions import UnitReductions


class _End:
    """What autograd calls when a backward ends. It lets go of it when the backward fails: so that is known."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    @uncaptured
    def __call__(self) -> None:
        self._run()


class RunningBackward:
    """What is known of the running backward.

    Args:
        reductions: of the model's units.
        calls: of its regions.
        report: of the model.

    Attributes:
        deferred: halves of backwards, for a pipeline's schedule; None: backward does all of its work at once.
        begin: is called when a backward has come to the model.
        finish: does what is left of a contract that it follows.
        end: is called when it has ended.
    """

    def __init__(self, reductions: UnitReductions, calls: LiveCalls, report: Report) -> None:
        self._reductions = reductions
        self._report = report
        self._calls = calls
        self._id = -1
        self._end_of: weakref.ref[_End] | None = None  # of the latest that has not ended
        self._ending: frozenset[Unit] = frozenset()
        self.deferred: list[Callable[[], None]] | None = None
        self.begin: Callable[[], None] = lambda: None
        self.finish: Callable[[], None] = lambda: None
        self.end: Callable[[], None] = lambda: None
        self._once = False
        self._halves: deque[list[Callable[[], None]]] = deque()

    def runs(self, only: frozenset[Unit] = frozenset()) -> None:
        """Sees to it that what is held is looked at when the running backward ends.

        Args:
            only: units that it ends, of a list of modules that was called in parts; empty: all.
        """
        if (number := backward_id()) != self._id:
            self.forget_failed()
            self._id, self._ending = number, only
            self._reductions.begin_backward()
            self.begin()
            end = _End(self._end)
            self._end_of = weakref.ref(end)
            call_at_end_of_backward(end)
        self._ending = self._ending | only if only and self._ending else frozenset()

    def _end(self) -> None:
        self._id = -1
        self.finish()
        self._reductions.end_backward(self._ending)
        self._calls.end_backward()
        self.end()
        self._end_of = None
        if self._once and self.deferred is not None:
            self._halves.append(self.deferred)
            self._once, self.deferred = False, None

    def defer_weights_once(self) -> None:
        """The backward that comes next computes gradients of inputs only; `run_earliest_weights` does the rest."""
        if self.deferred is None:
            self._once, self.deferred = True, []

    def run_earliest_weights(self) -> None:
        """Does the rest of the earliest backward of which it is to be done."""
        for run in self._halves.popleft() if self._halves else ():
            run()

    def begin_forward(self) -> None:
        """A forward begins: what was to be a backward for inputs has not come to the model."""
        if self._once:
            self._once, self.deferred = False, None
        self.forget_failed()

    def forget_failed(self) -> None:
        """Forgets what a backward that has failed left unreduced."""
        if self._end_of is None or self._end_of() is not None:
            return
        self._id, self._end_of = -1, None
        if self._reductions.forget_backward():
            self._report.note_once(
                "a backward has failed: gradients that it left unreduced, of units that it was to synchronize, are "
                "forgotten"
            )
        if backward_id() == -1:  # else the one that runs ends what both have left
            self._calls.end_backward()
            self.end()

    def reset(self) -> None:
        """Forgets what a failed step left behind."""
        self._halves.clear()
        self._end_of = None
        self.begin_forward()

    def defer_weights(self) -> Callable[[], Callable[[], None]]:
        """From now on backward computes gradients of inputs only; what is returned yields the rest of it, so far."""
        self.deferred = []

        def take() -> Callable[[], None]:
            halves, self.deferred = self.deferred or [], []

            def run() -> None:
                while halves:
                    halves.pop(0)()

            return run

        return take
