"""The Triton kernel without a GPU: what it computes, interpreted, and what it is compiled to. A process for each."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 280

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def output_of(*arguments: str, interpret: bool) -> str:
    environment = {**os.environ, "TRITON_INTERPRET": str(int(interpret)), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_interpreted_copies_give_the_bits_of_torch() -> None:
    out = output_of("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels", interpret=True)
    assert " passed" in out and "failed" not in out and "skipped" not in out


def test_compiled_forms_use_wide_accesses_few_registers_and_hardware_conversion() -> None:
    forms = json.loads(output_of("-m", "graphshard.kernels.compile_report", "--json", interpret=False))
    assert {form["arch"] for form in forms} == {80, 90, 100}
    for form in forms:
        assert form["spill_bytes"] == 0, form
        if "unaligned" in form["form"]:
            assert form["registers"] <= 64, form
            continue
        assert form["registers"] <= 32, form  # 8 blocks of 256 threads on a multiprocessor: all its threads
        assert form["loads_128"] >= 2, form
        assert form["stores_128"] == form["stores"] > 0, form
        if "to bf16" in form["form"]:
            assert form["bf16_conversions"] > 0, form
