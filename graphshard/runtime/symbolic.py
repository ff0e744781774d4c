"""Graphs that torch fails to trace with symbolic sizes or numbers, and traces where each is captured by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from graphshard.compat.dynamo import TorchDynamoException

_OURS = str(Path(__file__).parent.parent)


class SymbolicTraceFailed(RuntimeError):
    """Torch has failed to trace a graph with symbolic sizes or numbers; says how."""


class SizesDiffer(RuntimeError):
    """Programs of a capture take something for granted of sizes that does not hold of a call; says what."""


@contextmanager
def naming_symbolic_failures(inputs: Sequence[Any]) -> Iterator[None]:
    """Around a trace of a graph with such inputs.

    Raises:
        SymbolicTraceFailed: torch has failed, and one of `inputs` is symbolic, or its size is.
    """
    try:
        yield
    except TorchDynamoException:  # to Dynamo, which may trace once more
        raise
    except Exception as error:
        if not any(map(_is_symbolic, inputs)) or not _is_of_torch(error):
            raise
        first = (str(error).splitlines() or [""])[0]
        raise SymbolicTraceFailed(
            f"torch {torch.__version__} fails to trace it with symbolic sizes or numbers ({type(error).__name__}: "
            f"{first:.120})"
        ) from error


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _is_of_torch(error: Exception) -> bool:
    """Whether it was raised outside graphshard; where a recursion ends is chance."""
    if isinstance(error, RecursionError):
        return True
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and not place.tb_frame.f_code.co_filename.startswith(_OURS)
