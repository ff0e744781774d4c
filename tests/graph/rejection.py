"""What a test of an invariant needs: the message of a rejection, and lowered toys to break."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from graphshard.errors import VerifyError
from tests.graph.graphs import Marked, lowered_until, toy_backward, toy_forward, toy_weights


def lowered_forward() -> Marked:
    return lowered_until(toy_forward(toy_weights()))


def lowered_backward() -> Marked:
    return lowered_until(toy_backward(toy_weights()))


def assert_rejects(invariant: str, check: Callable[[], None], *named: str) -> None:
    """The check fails with this invariant, and the message names each of `named`."""
    with pytest.raises(VerifyError) as caught:
        check()
    assert caught.value.invariant == invariant
    message = str(caught.value)
    assert message.startswith(f"[{invariant}] ")
    for name in named:
        assert name in message
