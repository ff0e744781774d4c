"""How alike the results of a graph are before and after a pass: what a pass declares, and what a check measures by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Roundings of one more or one less addition, on each rank and on the way, in units of the coarsest dtype's step.
_ROUNDINGS = 4


@dataclass(frozen=True)
class Bitwise:
    """Every bit is the same, signs of zeros and places of NaNs included."""

    def differ(self, got: Tensor, want: Tensor, terms: int, dtype: torch.dtype) -> str:
        """What differs, in words; ``""``: nothing.

        Args:
            got: after the pass.
            want: before it, of the same shape and dtype.
            terms: how many ranks a sum goes over at most.
            dtype: the coarsest floating dtype on the way.
        """
        unequal = _unequal_bits(got, want)
        count = int(unequal.sum())
        return f"{count} of {unequal.numel()} elements differ, {_first(got, want, unequal)}" if count else ""

    def __str__(self) -> str:
        return "bitwise"


@dataclass(frozen=True)
class Regrouped:
    """Sums have their terms in other groups, and last bits differ: by at most 4 roundings of the coarsest dtype for
    each rank, of the largest element.

    Attributes:
        reason: why the pass may.
    """

    reason: str

    def differ(self, got: Tensor, want: Tensor, terms: int, dtype: torch.dtype) -> str:
        """As of `Bitwise`."""
        if not got.dtype.is_floating_point or not got.numel():
            return Bitwise().differ(got, want, terms, dtype)
        a, b = got.double(), want.double()
        step = max(torch.finfo(dtype).eps, torch.finfo(got.dtype).eps)
        finite = b.abs().where(b.isfinite(), torch.zeros_like(b))
        bound = _ROUNDINGS * max(terms, 1) * step * float(finite.max())
        alike = ((a - b).abs() <= bound) | (a.isnan() & b.isnan()) | (a == b)
        count = int((~alike).sum())
        if not count:
            return ""
        return f"{count} of {a.numel()} elements differ by more than {bound:.1e}, {_first(got, want, ~alike)}"

    def __str__(self) -> str:
        return f"bitwise but for sums regrouped: {self.reason}"


Sameness = Bitwise | Regrouped


def bitwise(edit: object) -> Sameness:
    """Of a pass that changes no bit, whatever its edit."""
    return Bitwise()


def _unequal_bits(got: Tensor, want: Tensor) -> Tensor:
    a, b = (value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1) for value in (got, want))
    if not a.numel():
        return torch.zeros(0, dtype=torch.bool)
    size = a.element_size()
    unequal = (a.view(torch.uint8).view(-1, size) != b.view(torch.uint8).view(-1, size)).any(1)
    if a.dtype.is_floating_point and size > 1:
        unequal &= ~(a.isnan() & b.isnan())
    return unequal


def _first(got: Tensor, want: Tensor, unequal: Tensor) -> str:
    place = int(unequal.reshape(-1).to(torch.uint8).argmax())
    values = (value.detach().reshape(-1)[place].item() for value in (got, want))
    return "first in place {}: got {!r}, want {!r}".format(place, *values)
