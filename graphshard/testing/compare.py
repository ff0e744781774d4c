"""Exact comparison of tensors, DTensors and collections of them, and errors that say where the first difference is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from graphshard.testing.tolerance import Tolerance, ulp_distance


class ParityError(AssertionError):
    """Two runs that must agree do not."""


@dataclass(frozen=True)
class Where:
    """What is compared, for the error.

    Attributes:
        what: ``"gradient"``, ``"loss"`` ...
        fqn: the parameter's or output's name; empty: there is one only.
        step: training step, from 0; None: before the first.
        rank: this rank; None: no process group.
    """

    what: str
    fqn: str = ""
    step: int | None = None
    rank: int | None = None

    def __str__(self) -> str:
        parts = [f"{self.what} {self.fqn!r}" if self.fqn else self.what]
        parts += [f"step {self.step}"] if self.step is not None else []
        parts += [f"rank {self.rank}"] if self.rank is not None else []
        return ", ".join(parts)

    def error(self, problem: str) -> ParityError:
        """The error that says `problem` about this place."""
        return ParityError(f"{self}: {problem}")


def compare_tensors(got: Tensor, want: Tensor, *, tolerance: Tolerance, where: Where) -> int:
    """Compares two tensors, or two DTensors: mesh, placements, global shape and this rank's shard.

    Returns:
        The largest distance between two elements, in units in the last place.

    Raises:
        ParityError: naming the place, the largest difference and the first differing index.
    """
    if isinstance(got, DTensor) or isinstance(want, DTensor):
        if not (isinstance(got, DTensor) and isinstance(want, DTensor)):
            raise where.error(f"got a {type(got).__name__}, want a {type(want).__name__}")
        for property_name, ours, theirs in (
            ("placements", got.placements, want.placements),
            ("shape", tuple(got.shape), tuple(want.shape)),
            ("mesh", got.device_mesh, want.device_mesh),
        ):
            if ours != theirs:
                raise where.error(f"{property_name}: got {ours}, want {theirs}")
        where = replace(where, what=f"{where.what} (this rank's shard)")
        got, want = got.to_local(), want.to_local()
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        raise where.error(f"got {got.dtype}{list(got.shape)}, want {want.dtype}{list(want.shape)}")
    got, want = got.detach(), want.detach()
    wrong = ~tolerance.accepts(got, want)
    if wrong.any():
        raise where.error(_told(got, want, wrong, tolerance))
    distance = ulp_distance(got, want)
    return int(distance.max()) if distance.numel() else 0


def compare_named(
    got: Mapping[str, Tensor | None], want: Mapping[str, Tensor | None], *, tolerance: Tolerance, where: Where
) -> int:
    """Compares tensors by FQN: the same names in the same order, None in the same places, and each tensor.

    Returns:
        The largest distance in units in the last place.

    Raises:
        ParityError: for the first difference.
    """
    if list(got) != list(want):
        missing, extra = [n for n in want if n not in got], [n for n in got if n not in want]
        if missing or extra:
            raise where.error(f"names: missing {missing}, unexpected {extra}")
        raise where.error(f"order of names: got {list(got)}, want {list(want)}")
    largest = 0
    for fqn, wanted in want.items():
        place, value = replace(where, fqn=fqn), got[fqn]
        if value is None or wanted is None:
            if value is not wanted:
                raise place.error(f"got {_kind(value)}, want {_kind(wanted)}")
            continue
        largest = max(largest, compare_tensors(value, wanted, tolerance=tolerance, where=place))
    return largest


def compare_nested(got: object, want: object, *, tolerance: Tolerance, where: Where) -> int:
    """Compares what a forward returned: tensors inside dicts, lists and tuples; anything else by `==`.

    Returns:
        The largest distance in units in the last place.

    Raises:
        ParityError: for the first difference.
    """
    if isinstance(got, Tensor) and isinstance(want, Tensor):
        return compare_tensors(got, want, tolerance=tolerance, where=where)
    if type(got) is not type(want):
        raise where.error(f"got a {type(got).__name__}, want a {type(want).__name__}")
    if isinstance(got, Mapping) and isinstance(want, Mapping):
        if list(got) != list(want):
            raise where.error(f"keys: got {list(got)}, want {list(want)}")
        pairs = [(str(key), got[key], want[key]) for key in want]
    elif isinstance(got, list | tuple) and isinstance(want, list | tuple):
        if len(got) != len(want):
            raise where.error(f"length: got {len(got)}, want {len(want)}")
        pairs = [(str(index), *pair) for index, pair in enumerate(zip(got, want, strict=True))]
    else:
        if got != want:
            raise where.error(f"got {got!r}, want {want!r}")
        return 0
    below = [
        compare_nested(ours, theirs, tolerance=tolerance, where=replace(where, fqn=f"{where.fqn}.{key}".lstrip(".")))
        for key, ours, theirs in pairs
    ]
    return max(below, default=0)


def _kind(value: Tensor | None) -> str:
    return "None" if value is None else f"a tensor {value.dtype}{list(value.shape)}"


def _told(got: Tensor, want: Tensor, wrong: Tensor, tolerance: Tolerance) -> str:
    """The differing elements: how many, the largest difference and the first in row-major order."""
    distance = torch.where(wrong, ulp_distance(got, want), -1)
    worst, first = int(distance.flatten().argmax()), int(wrong.flatten().int().argmax())
    lines = [f"{int(wrong.sum())} of {wrong.numel()} elements differ by more than {tolerance} allows"]
    for title, flat in (("largest", worst), ("first", first)):
        ours, theirs = got.flatten()[flat].item(), want.flatten()[flat].item()
        index = [int(i) for i in torch.unravel_index(torch.tensor(flat), got.shape)]
        ulps = int(distance.flatten()[flat])
        apart = "NaN or infinity" if ulps >= torch.iinfo(torch.int32).max else f"{ulps} ulp"
        size = f", {abs(ours - theirs):.3g}" if isinstance(ours, float) else ""
        lines.append(f"  {title}: index {index}, got {ours!r}, want {theirs!r} ({apart}{size})")
    return "\n".join(lines)
