"""How far apart two numbers may be, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

NanRule = Literal["reject", "same places"]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FARTHEST = torch.iinfo(torch.int64).max


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """How many representable numbers lie between the elements of `a` and `b`, as int64 of their shape.

    -0.0 and 0.0 are 0 apart, two NaN 0, a NaN and a number the largest int64. Two fp64 numbers of opposite sign may be
    farther apart than an int64 can say: they too get the largest. Of integers, booleans and complex numbers, equal ones
    are 0 apart and others the largest.

    Args:
        a: `[*]`, floating point for a distance.
        b: of the same shape and dtype.

    Raises:
        TypeError: if the dtypes differ.
    """
    if a.dtype != b.dtype:
        raise TypeError(f"ulp_distance: got {a.dtype} and {b.dtype}, want one dtype")
    if not a.dtype.is_floating_point:
        return torch.where(a == b, 0, _FARTHEST)
    bits = _BITS[a.dtype.itemsize]
    ours, theirs = a.contiguous().view(bits).long(), b.contiguous().view(bits).long()
    magnitude = torch.iinfo(bits).max  # every bit but the sign
    our_size, their_size = ours & magnitude, theirs & magnitude
    across_zero = our_size + their_size
    across_zero = torch.where(across_zero < 0, _FARTHEST, across_zero)  # overflow, fp64 only
    distance = torch.where((ours < 0) == (theirs < 0), (our_size - their_size).abs(), across_zero)
    our_nan, their_nan = _isnan(a), _isnan(b)
    distance = torch.where(our_nan | their_nan, _FARTHEST, distance)
    return torch.where(our_nan & their_nan, 0, distance)


def _isnan(x: Tensor) -> Tensor:
    return (x.float() if x.dtype.itemsize == 1 else x).isnan()


@dataclass(frozen=True)
class Bitwise:
    """The same bits.

    Attributes:
        reason: why the bits must be equal.
        nan: ``"reject"``: a NaN on either side is a difference, for then the run says nothing; ``"same places"``: NaN
            equals NaN, whatever its payload.
        equal_zeros: why -0.0 may stand for 0.0; empty: it may not.
    """

    reason: str = "the same sums in the same order"
    nan: NanRule = field(default="reject", kw_only=True)
    equal_zeros: str = field(default="", kw_only=True)

    def accepts(self, got: Tensor, want: Tensor) -> Tensor:
        """Elementwise, as a bool tensor."""
        if got.dtype.is_complex:
            both = self.accepts(torch.view_as_real(got), torch.view_as_real(want))
            return both.all(dim=-1)
        if not got.dtype.is_floating_point:
            return got == want
        bits = _BITS[got.dtype.itemsize]
        same = got.contiguous().view(bits) == want.contiguous().view(bits)
        if self.equal_zeros:
            same |= (got == 0) & (want == 0)
        return _with_nan(same, got, want, self.nan)

    def __str__(self) -> str:
        return f"Bitwise ({self.reason})"


@dataclass(frozen=True)
class Ulps:
    """At most `n` units in the last place apart, or `atol` in absolute terms.

    Attributes:
        n: units in the last place.
        reason: which sums are done in another order, and why that many.
        atol: absolute difference that is accepted too, for sums that cancel near zero.
        nan: as in `Bitwise`.
    """

    n: int
    reason: str
    atol: float = field(default=0.0, kw_only=True)
    nan: NanRule = field(default="reject", kw_only=True)

    def __post_init__(self) -> None:
        if self.n < 0 or self.atol < 0:
            raise ValueError(f"Ulps: got n={self.n}, atol={self.atol}, want neither negative")
        if not self.reason.strip():
            raise ValueError("Ulps: say in `reason` why the bits may differ")

    def accepts(self, got: Tensor, want: Tensor) -> Tensor:
        """Elementwise, as a bool tensor."""
        close = ulp_distance(got, want) <= self.n
        if not got.dtype.is_floating_point:
            return close
        close |= (got - want).abs() <= self.atol
        return _with_nan(close, got, want, self.nan)

    def __str__(self) -> str:
        return f"Ulps({self.n}{f', atol={self.atol:g}' if self.atol else ''}) ({self.reason})"


Tolerance = Bitwise | Ulps


def _with_nan(close: Tensor, got: Tensor, want: Tensor, rule: NanRule) -> Tensor:
    our_nan, their_nan = _isnan(got), _isnan(want)
    if rule == "reject":
        return close & ~our_nan & ~their_nan
    return torch.where(our_nan | their_nan, our_nan & their_nan, close)
