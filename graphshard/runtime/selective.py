"""Selective checkpoints around compiled code: their mode records operators in forward, and wants the same ones when it
recomputes, where programs may have others (a parameter that stayed gathered is gathered again).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from graphshard.compat.tensors import unseen
from graphshard.reporting.report import Report


@contextmanager
def recomputing_all(report: Report) -> Iterator[None]:
    """Inside, the mode sees nothing: it saves nothing in forward, and all is recomputed."""
    report.say_once(
        "a selective checkpoint is around compiled regions, not in one graph: what they compute is recomputed, "
        "and nothing of it saved, whatever its policy says"
    )
    with unseen():
        yield
