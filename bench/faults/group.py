"""A process group around another one, which launches what it is asked to, or not quite."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work
from torch.futures import Future

from bench.networks.python_group import PythonGroup
from graphshard.compat.groups import register_work, resolve_process_group

BACKEND = "faulty"
KINDS = ("dropped", "delayed", "duplicated", "reordered")
# What c10d and the functional collectives call, by the names of all torch versions.
COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "allgather", "broadcast", "scatter", "barrier", "reduce_scatter",
    "_allgather_base", "_reduce_scatter_base", "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced",
    "all_gather_single", "reduce_scatter_single", "all_gather_single_coalesced", "reduce_scatter_single_coalesced",
)  # fmt: skip


class HeldWork(Work):
    """Of a collective that is launched later, or when it is waited for, or never."""

    def __init__(self, launch: Callable[[], Any] | None, outputs: Any) -> None:
        super().__init__()
        self._launch = launch
        self._work: Any = None
        self._future: Future[Any] = Future()
        self._future.set_result(outputs)

    @property
    def is_launched(self) -> bool:
        return self._launch is None

    def go(self) -> None:
        if self._launch is not None:
            launch, self._launch = self._launch, None
            self._work = launch()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.go()
        if self._work is not None:
            self._work.wait()
        return True

    def is_completed(self) -> bool:
        return self.is_launched and (self._work is None or bool(self._work.is_completed()))

    def get_future(self) -> Future[Any]:
        self.wait()
        return self._future


class FaultyGroup(PythonGroup):
    """Hands every collective on.

    Args:
        inner: does the work.
    """

    supports_coalescing = False  # as gloo, so that programs are those of gloo

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(int(inner.rank()), int(inner.size()), BACKEND)
        self._inner = inner
        self._kind, self._delay_s = "", 0.0
        self._tell: Callable[[], None] = lambda: None
        self._held: HeldWork | None = None

    def disturb(self, kind: str, delay_s: float, tell: Callable[[], None]) -> None:
        """Makes the next collective go wrong. `tell` is called then."""
        if kind not in KINDS:
            raise ValueError(f"faults: collective: got {kind!r}, want one of {', '.join(KINDS)}")
        self._kind, self._delay_s, self._tell = kind, delay_s, tell

    def launch(self, name: str, args: tuple[Any, ...]) -> Any:
        def really() -> Any:
            return getattr(self._inner, name)(*args)

        held, self._held = self._held, None
        if held is not None and not held.is_launched:
            self._tell()
            work = really()
            held.go()
            return work
        if held is not None:  # it was awaited before the next one: another pair may do
            self._kind = "reordered"
        kind, self._kind = self._kind, ""
        if kind == "reordered":
            self._held = HeldWork(really, args[0])
            return self._held
        if kind:
            self._tell()
        if kind == "dropped":
            return HeldWork(None, args[0])
        if kind == "delayed":
            time.sleep(self._delay_s)
        if kind == "duplicated":
            really().wait()
        return really()


def _collective(name: str) -> Callable[..., Any]:
    def call(self: FaultyGroup, *args: Any) -> Any:
        return self.launch(name, args)

    return call


for _name in COLLECTIVES:
    setattr(FaultyGroup, _name, _collective(_name))

_made: list[FaultyGroup] = []
_libraries: list[Any] = []


def faulty_group() -> FaultyGroup:
    """A new group around the default one, as c10d knows it; call it once, on every rank."""
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
    dist.new_group(backend=BACKEND)
    # torch before 2.15 asks a C++ backend for this one, and no group of Python's.
    library = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("all_gather_into_tensor_out", _gather_into, "CPU")  # type: ignore[no-untyped-call]
    _libraries.append(library)
    return _made[-1]


def _create(options: Any, _: Any = None) -> FaultyGroup:
    assert dist.group.WORLD is not None
    _made.append(FaultyGroup(dist.group.WORLD))
    return _made[-1]


def _gather_into(own: Tensor, world_size: int, group_name: str, *, out: Tensor) -> Tensor:
    group: Any = resolve_process_group(group_name)
    register_work(out, getattr(group, "_allgather_base")(out, own))  # noqa: B009 - public in c10d, by this name only
    return out
