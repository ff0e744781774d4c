"""Results of Inductor's code in the strides that they have in the graph.

Of a view that leaves something out, as a slice does, Inductor makes a copy that does not. AOTAutograd asks for the
strides of a whole graph, and compiles backward for these; what follows on a part of one counts on those of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor

from graphshard.compat.symbol_places import SymbolPlaces

Strides: TypeAlias = tuple[int | torch.SymInt, ...]


class StridesUnknown(Exception):
    """Inductor changes strides of a result that depend on sizes that the arguments do not tell."""


def other_strides(given: Sequence[Sequence[object] | None], values: Sequence[object]) -> dict[int, Strides]:
    """By the number of the result, strides in the graph of those that Inductor gives others.

    Args:
        given: Inductor's strides, as texts; None: of no tensor.
        values: fake results of the graph.
    """
    found: dict[int, Strides] = {}
    for number, (strides, value) in enumerate(zip(given, values, strict=True)):
        if strides is not None and isinstance(value, Tensor) and differ(value, strides):
            found[number] = tuple(value.stride())
    return found


def differ(value: Tensor, strides: Sequence[object]) -> bool:
    """Whether a fake tensor has others, where that matters."""
    return any(size != 1 and str(a) != str(b) for size, a, b in zip(value.shape, strides, value.stride(), strict=True))


class InStrides:
    """Code some of whose results are put into other strides.

    Args:
        code: takes its arguments as one list.
        strides: by the number of the result.
        inputs: fake values of the arguments.

    Raises:
        StridesUnknown: a stride depends on a symbol that `inputs` do not tell.
    """

    def __init__(
        self, code: Callable[[list[Any]], Any], strides: Mapping[int, Strides], inputs: Sequence[object] = ()
    ) -> None:
        self._code = code
        self._strides = {number: tuple(map(_expression, its)) for number, its in strides.items()}
        used = {symbol for its in self._strides.values() for stride in its for symbol in stride.free_symbols}
        self._places = SymbolPlaces(inputs if used else ())
        if not used <= self._places.symbols:
            raise StridesUnknown
        self._known: dict[tuple[int | None, ...], dict[int, tuple[int, ...]]] = {}
        self.source_code = getattr(code, "source_code", None)

    def __call__(self, args: list[Any]) -> list[Any]:
        sizes = self._places.sizes(args)
        if (strides := self._known.get(sizes)) is None:
            numbers = self._places.numbers(sizes)
            strides = self._known[sizes] = {
                number: tuple(int(stride.xreplace(numbers)) for stride in its) for number, its in self._strides.items()
            }
        results = list(self._code(args))
        for number, its in strides.items():
            results[number] = _in_strides(results[number], its)
        return results


def _expression(stride: int | torch.SymInt) -> sympy.Expr:
    return stride.node.expr if isinstance(stride, torch.SymInt) else sympy.Integer(stride)


def _in_strides(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    size = tensor.shape
    for dim, stride in enumerate(strides):
        if stride == 0:  # an expanded one, which cannot be written
            tensor = tensor.narrow(dim, 0, 1)
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor).expand(size)
