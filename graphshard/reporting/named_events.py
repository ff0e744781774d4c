"""Names of collectives in traces of torch's profiler: around each launch and wait of a program, while one is active.

Generated code calls bare operators, of which a trace shows kind and sizes. NCCL's flight recorder takes no text:
its entries name the process group and the Python stack, whose innermost line of generated code is the launch; the
functional collectives have no argument for more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.profiler import record_function

from graphshard.graph.gather_outputs import GATHER_INTO
from graphshard.graph.ir import LAUNCHES, WAIT
from graphshard.reporting.report import NamedShard, ProgramRecord

PREFIX = "graphshard: "
_SHOWN_FQNS = 4
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

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        what = _WHAT.get(func) or _IN_PLACE.get(str(func))
        if what is None:
            return func(*args, **(kwargs or {}))
        with record_function(self._name(what)):
            return func(*args, **(kwargs or {}))

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


@contextmanager
def named_events(record: ProgramRecord, shards: Sequence[NamedShard]) -> Iterator[None]:
    """Inside, one run of a program for `shards` shows by name in the profiler's trace, and so do its collectives."""
    with record_function(f"{PREFIX}{record.direction} of {record.where} [{record.flags}]"), _Naming(record, shards):
        yield
