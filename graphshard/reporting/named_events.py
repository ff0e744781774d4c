"""Names in traces of torch's profiler: around each launch and wait of a program, and around what it computes of each
unit, while one is active.

Generated code calls bare operators, of which a trace shows kind and sizes. NCCL's flight recorder takes no text:
its entries name the process group and the Python stack, whose innermost line of generated code is the launch; the
functional collectives have no argument for more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.profiler import record_function

from graphshard.graph.gather_outputs import GATHER_INTO
from graphshard.graph.ir import LAUNCHES, WAIT
from graphshard.reporting.report import NamedShard, ProgramRecord

PREFIX = "graphshard: "
_SHOWN_FQNS = 4
# Operators of a graph that a mode does not see are passed over, up to so many.
_AHEAD = 8
_WHAT: dict[Any, str] = {**dict.fromkeys((*LAUNCHES, GATHER_INTO), "launch"), WAIT: "wait"}
# Inductor reduces in place where it can.
_IN_PLACE = {"_c10d_functional.all_reduce_.default": "launch"}


class _Naming(TorchFunctionMode):
    """Names the launches and waits of one run of a program, or of half of one, in order."""

    def __init__(self, record: ProgramRecord, shards: Sequence[NamedShard]) -> None:
        super().__init__()
        self._shards = shards
        self._record = record
        self._next = 0
        self._computed = 0
        self._unit = ""
        self._ranges = ExitStack()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        what = _WHAT.get(func) or _IN_PLACE.get(str(func))
        if what is None:
            self._enter_unit(func)
            return func(*args, **(kwargs or {}))
        with record_function(self._name(what)):
            return func(*args, **(kwargs or {}))

    def computing(self, units: str) -> record_function:
        """A range around what is computed of some units."""
        return record_function(f"{PREFIX}{self._record.direction} of {self._record.units_for(units, self._shards)}")

    def _enter_unit(self, operator: object) -> None:
        """Begins another range where an operator is of another unit than the one before."""
        computed = self._record.computed
        for place in range(self._computed, min(self._computed + _AHEAD, len(computed))):
            if computed[place][0] is operator:
                self._computed = place + 1
                if computed[place][1] != self._unit:
                    self.leave_unit()
                    self._unit = computed[place][1]
                    self._ranges.enter_context(self.computing(self._unit))
                return

    def leave_unit(self) -> None:
        """Ends the range of the unit that is computed."""
        self._ranges.close()
        self._unit = ""

    def _name(self, what: str) -> str:
        order = self._record.order
        # The second half of a program begins with a wait.
        while self._next < len(order) and order[self._next][0] != what:
            self._next += 1
        if self._next == len(order):
            return f"{PREFIX}{what}"
        bucket, fqns = self._record.carried_for(self._next, self._shards)
        self._next += 1
        shown = [*fqns[:_SHOWN_FQNS], *(["..."] if len(fqns) > _SHOWN_FQNS else [])]
        return f"{PREFIX}{what} {bucket}" + (f" ({', '.join(shown)})" if shown else "")


_naming: ContextVar[_Naming | None] = ContextVar("naming", default=None)


def names_events() -> bool:
    """Whether a program runs in this thread whose events are named."""
    return _naming.get() is not None


def computing(units: str) -> AbstractContextManager[object]:
    """A range around what the program that runs computes of some units: ``"layers.0"``, ``"layers.0..layers.2"``."""
    naming = _naming.get()
    return nullcontext() if naming is None or not units else naming.computing(units)


@contextmanager
def named_events(record: ProgramRecord, shards: Sequence[NamedShard]) -> Iterator[None]:
    """Inside, one run of a program for `shards` shows by name in the profiler's trace, and so do its collectives, and
    what it computes of each unit where its code is in such parts.
    """
    naming = _Naming(record, shards)
    with record_function(f"{PREFIX}{record.direction} of {record.where} [{record.flags}]"), naming:
        token = _naming.set(naming)
        try:
            yield
        finally:
            _naming.reset(token)
            naming.leave_unit()
