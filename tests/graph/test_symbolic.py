"""Which failures of a trace are those of torch with symbolic sizes: what Dynamo waits for, and our own, are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch.fx.experimental.proxy_tensor import make_fx

from graphshard.compat.dynamo import leave_frame
from graphshard.runtime.symbolic import SymbolicTraceFailed, naming_symbolic_failures


def value(mode: str) -> Any:
    gm = make_fx(lambda x: x.sin(), tracing_mode=mode)(torch.ones(4, 6))
    return next(iter(gm.graph.find_nodes(op="placeholder"))).meta["val"]


def recursive(depth: int) -> int:
    return recursive(depth + 1)


def fails_in_torch() -> None:
    torch.ones(2) @ torch.ones(3)


@pytest.mark.parametrize("fails", [fails_in_torch, lambda: torch.nn.Linear("a", 2), lambda: recursive(0)])  # type: ignore[arg-type]
def test_failure_of_a_symbolic_trace_is_named(fails: Any) -> None:
    said = r"fails to trace it with symbolic sizes or numbers \(\w+Error: "
    with pytest.raises(SymbolicTraceFailed, match=said), naming_symbolic_failures([None, value("symbolic")]):
        fails()
    with pytest.raises((RuntimeError, TypeError, RecursionError)) as caught, naming_symbolic_failures([value("fake")]):
        fails()
    assert not isinstance(caught.value, SymbolicTraceFailed)


def test_what_dynamo_waits_for_and_our_own_errors_pass() -> None:
    for raised in (TensorifyScalarRestartAnalysis, Exception):
        with pytest.raises(raised) as caught, naming_symbolic_failures([value("symbolic")]):
            if raised is Exception:
                leave_frame("why")
            raise raised
        assert not isinstance(caught.value, SymbolicTraceFailed)
