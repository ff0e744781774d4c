"""What programs that are compiled late take for granted of symbolic sizes: Dynamo has written its guards by then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor

_INT32_MAX = 2**31 - 1


class LateGuards:
    """Those of the programs of one region.

    Args:
        fixes: is told of one that cannot be looked at before a call, in words.

    Attributes:
        is_late: whether that is so of all: other regions have run when this one's turn comes.
    """

    def __init__(self, fixes: Callable[[str], None]) -> None:
        self._fixes = fixes
        self.is_late = False
        self._places: dict[sympy.Symbol, tuple[int, int]] = {}
        self._guards: list[Any] = []
        self._known: dict[tuple[int, ...], str] = {}

    def bind(self, inputs: Sequence[Any]) -> None:
        """Is told of the fake arguments of a forward: of symbols, and of sizes that are symbols."""
        for place, value in enumerate(inputs):
            sizes = enumerate(value.shape) if isinstance(value, Tensor) else ((-1, value),)
            for dim, size in sizes:
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    self._places.setdefault(size.node.expr, (place, dim))

    @contextmanager
    def noticed(self, fake_mode: Any) -> Iterator[None]:
        """Has what is taken for granted inside noticed. `fake_mode`: of a compilation that is over; None: of none."""
        sizes = getattr(fake_mode, "shape_env", None)
        before = 0 if sizes is None else len(sizes.guards)
        yield
        for guard in () if sizes is None else sizes.guards[before:]:
            if not _is_of_counting(guard.expr):
                self._add(guard.expr)

    def _add(self, guard: Any) -> None:
        if self.is_late or not guard.free_symbols <= self._places.keys():
            self._fixes(_said(guard))
        else:
            self._guards.append(guard)
            self._known.clear()

    def failed(self, args: Sequence[Any]) -> str:
        """One that does not hold of a forward with such arguments, in words; ``""``: all do."""
        if not self._guards:
            return ""
        found = tuple(args[place] if dim < 0 else args[place].shape[dim] for place, dim in self._places.values())
        if (text := self._known.get(found)) is None:
            numbers = dict(zip(self._places, map(sympy.Integer, found), strict=True))
            failing = (guard for guard in self._guards if guard.xreplace(numbers) is not sympy.true)
            text = self._known[found] = next(map(_said, failing), "")
        return text


def _said(guard: Any) -> str:
    return f"a program is compiled for sizes with {guard!s:.200}"


def _is_of_counting(guard: Any) -> bool:
    """Whether it says no more than that a size can be counted, in 32 bits or in 64."""
    return any(argument.is_number and abs(argument) >= _INT32_MAX for argument in guard.args)
