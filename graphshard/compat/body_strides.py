"""Results of Inductor's code in the strides that they have in the graph.

Of a view that leaves something out, as a slice does, Inductor makes a copy that does not. AOTAutograd asks for the
strides of a whole graph, and compiles backward for these; what follows on a part of one counts on those of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class StridesUnknown(Exception):
    """Inductor changes strides of a result that depend on sizes that are not known."""


def other_strides(given: Sequence[Sequence[object] | None], values: Sequence[object]) -> dict[int, tuple[int, ...]]:
    """By the number of the result, strides in the graph of those that Inductor gives others.

    Args:
        given: Inductor's strides, as texts; None: of no tensor.
        values: fake results of the graph.

    Raises:
        StridesUnknown: one of them is symbolic.
    """
    found = {}
    for number, (strides, value) in enumerate(zip(given, values, strict=True)):
        if strides is None or not isinstance(value, Tensor):
            continue
        wanted = tuple(value.stride())
        if any(size != 1 and str(a) != str(b) for size, a, b in zip(value.shape, strides, wanted, strict=True)):
            if not all(isinstance(stride, int) for stride in wanted):
                raise StridesUnknown
            found[number] = wanted
    return found


class InStrides:
    """Code some of whose results are put into other strides.

    Args:
        code: takes its arguments as one list.
        strides: by the number of the result.
    """

    def __init__(self, code: Callable[[list[Any]], Any], strides: dict[int, tuple[int, ...]]) -> None:
        self._code, self._strides = code, strides
        self.source_code = getattr(code, "source_code", None)

    def __call__(self, args: list[Any]) -> list[Any]:
        results = list(self._code(args))
        for number, strides in self._strides.items():
            results[number] = _in_strides(results[number], strides)
        return results


def _in_strides(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    size = tensor.shape
    for dim, stride in enumerate(strides):
        if stride == 0:  # an expanded one, which cannot be written
            tensor = tensor.narrow(dim, 0, 1)
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor).expand(size)
