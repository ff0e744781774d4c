"""Which symbols, and sizes computed from them, the arguments of a graph tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor


class SymbolPlaces:
    """Where the arguments of one graph tell symbols.

    Args:
        inputs: their fake values.
    """

    def __init__(self, inputs: Sequence[Any] = ()) -> None:
        # By symbol, the place of an argument, and a dim of it; -1: it is the argument.
        self._of: dict[sympy.Symbol, tuple[int, int]] = {}
        for place, value in enumerate(inputs):
            sizes = enumerate(value.shape) if isinstance(value, Tensor) else ((-1, value),)
            for dim, size in sizes:
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    self._of.setdefault(size.node.expr, (place, dim))

    @property
    def symbols(self) -> AbstractSet[sympy.Symbol]:
        """All that they tell."""
        return self._of.keys()

    def sizes(self, args: Sequence[Any]) -> tuple[int | None, ...]:
        """What the symbols are in a call with such arguments; None: no number, as a jagged tensor's."""
        found = (args[place] if dim < 0 else args[place].shape[dim] for place, dim in self._of.values())
        return tuple(size if isinstance(size, int) else None for size in found)

    def numbers(self, sizes: tuple[int | None, ...]) -> Mapping[sympy.Symbol, sympy.Integer]:
        """Those that are numbers by symbol, to be put into an expression."""
        return {symbol: sympy.Integer(size) for symbol, size in zip(self._of, sizes, strict=True) if size is not None}
