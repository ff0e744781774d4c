"""What late programs take for granted of sizes is looked at before the next call, or told where it cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from graphshard.compat.late_guards import LateGuards


def traced() -> tuple[Any, Any]:
    """A fake argument with symbolic sizes, and its mode."""
    gm = make_fx(lambda x: x.sin(), tracing_mode="symbolic")(torch.ones(4, 6))
    value = next(iter(gm.graph.find_nodes(op="placeholder"))).meta["val"]
    return value, value.fake_mode


def test_guard_is_looked_at_before_each_call() -> None:
    value, mode = traced()
    guards = LateGuards(lambda guard: pytest.fail(guard))
    guards.bind([None, value])
    with guards.noticed(mode):
        assert value.shape[0] * 2 <= 8 and value.shape[1] != 5 and value.shape[1] < 2**40
    assert [guards.failed([None, torch.ones(*size)]) for size in ((4, 6), (3, 7), (4, 6))] == ["", "", ""]
    assert "<= 8" in guards.failed([None, torch.ones(5, 6)])
    assert "5" in guards.failed([None, torch.ones(4, 5)])


def test_guards_of_a_running_compilation_are_dynamos() -> None:
    value, _ = traced()
    guards = LateGuards(lambda guard: pytest.fail(guard))
    guards.bind([value])
    with guards.noticed(None):
        assert value.shape[0] == 4
    assert guards.failed([torch.ones(5, 6)]) == ""


def test_guard_that_no_arguments_tell_is_told_at_once() -> None:
    value, mode = traced()
    told = list[str]()
    guards = LateGuards(told.append)
    guards.bind([])
    with guards.noticed(mode):
        assert value.shape[0] == 4
    assert len(told) == 1 and "4" in told[0]


def test_guard_that_only_arguments_of_a_backward_tell_is_looked_at_there() -> None:
    value, mode = traced()
    guards = LateGuards(lambda guard: pytest.fail(guard))
    guards.bind([])
    guards.bind([value], backward=True)
    with guards.noticed(mode):
        assert value.shape[0] == 4
    assert guards.failed([]) == ""
    assert "4" in guards.failed([torch.ones(5, 6)], backward=True)
