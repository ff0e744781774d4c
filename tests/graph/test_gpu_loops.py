"""Tests of tests/gpu that take bodies from tests/dist name arguments that these have: seen without a GPU, too."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest

PARITY = Path(__file__).parents[1] / "gpu" / "test_parity.py"


def loops() -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location("gpu_parity", PARITY)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, Any] = module.LOOPS
    return found


@pytest.mark.parametrize("name", (LOOPS := loops()))
def test_loop_takes_its_arguments(name: str) -> None:
    test, arguments = LOOPS[name]
    inspect.signature(test).bind(backend="aot_eager", **arguments)
