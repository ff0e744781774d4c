"""What programs that are compiled late take for granted of symbolic sizes: Dynamo has written its guards by then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sympy  # type: ignore[import-untyped]

from graphshard.compat.symbol_places import SymbolPlaces

_INT32_MAX = 2**31 - 1


class LateGuards:
    """Those of the programs of one region.

    Args:
        fixes: is told of one that the arguments of neither can tell, in words.
    """

    def __init__(self, fixes: Callable[[str], None]) -> None:
        self._fixes = fixes
        self._places = {backward: SymbolPlaces() for backward in (False, True)}
        self._guards: list[Any] = []
        self._known: dict[tuple[bool, int, tuple[int | None, ...]], str] = {}

    def bind(self, inputs: Sequence[Any], backward: bool = False) -> None:
        """Is told of the fake arguments of a forward, or of its backward."""
        self._places[backward] = SymbolPlaces(inputs)

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
        self._guards.append(guard)
        if not any(guard.free_symbols <= places.symbols for places in self._places.values()):
            self._fixes(_said(guard))

    def failed(self, args: Sequence[Any], backward: bool = False) -> str:
        """One that does not hold of a call with such arguments, in words; ``""``: all do, as far as these tell."""
        if not self._guards:
            return ""
        places = self._places[backward]
        sizes = places.sizes(args)
        key = backward, len(self._guards), sizes
        if (text := self._known.get(key)) is None:
            numbers = places.numbers(sizes)
            failing = (guard for guard in self._guards if guard.xreplace(numbers) is sympy.false)
            text = self._known[key] = next(map(_said, failing), "")
        return text


def _said(guard: Any) -> str:
    return f"a program is compiled for sizes with {guard!s:.200}"


def _is_of_counting(guard: Any) -> bool:
    """Whether it says no more than that a size can be counted, in 32 bits or in 64."""
    return any(argument.is_number and abs(argument) >= _INT32_MAX for argument in guard.args)
