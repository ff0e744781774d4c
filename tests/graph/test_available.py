"""Where the kernel does not run, copies are torch's, and that is said once, by name."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator

import pytest
import torch

from graphshard.kernels import available, fuses_on
from graphshard.kernels import ops as kernels
from graphshard.reporting.report import Report

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    available.why_unfused.cache_clear()
    available.warn_once.cache_clear()
    yield
    available.why_unfused.cache_clear()
    available.warn_once.cache_clear()


def without_triton(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    return "copies are not fused: triton is not installed; pip install triton"


def old_gpu(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.version, "hip", None)
    return "copies are not fused: got compute capability 7.5, want 8.0 or above"


def rocm(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(torch.version, "hip", "6.0")
    return "copies are not fused: ROCm is not tested"


@pytest.mark.parametrize("make", [without_triton, old_gpu, rocm], ids=lambda make: make.__name__)
def test_programs_keep_torchs_copies_and_the_report_says_why_once(make, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    why, report = make(monkeypatch), Report()
    assert not fuses_on(CUDA, report.say_once) and not fuses_on(CUDA, report.say_once)
    assert report.fallbacks == [why]


def test_programs_fuse_on_the_least_capability_and_above(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    for number, capability in enumerate([(8, 0), (9, 0), (10, 0)]):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert fuses_on(torch.device("cuda", number), pytest.fail)


def test_plans_do_not_count_on_a_pass_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert fuses_on(CUDA, pytest.fail)
    monkeypatch.setenv("GRAPHSHARD_DISABLE", "order_launches, fuse_copies")
    assert not fuses_on(CUDA, pytest.fail)


def test_nothing_is_said_of_cpus() -> None:
    assert not fuses_on(torch.device("cpu"), pytest.fail) and not fuses_on(None, pytest.fail)


def test_other_accelerators_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    assert not fuses_on(torch.device("xpu"), said.append)
    assert said == ["copies are not fused on xpu"]


@pytest.mark.parametrize("make", [without_triton, old_gpu], ids=lambda make: make.__name__)
def test_operators_copy_as_torch_does_with_one_warning(make, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    why = make(monkeypatch)
    reason = available.why_unfused(CUDA)
    monkeypatch.setattr(kernels, "why_unfused", lambda device: reason)  # CPU tensors stand for CUDA's
    shards = [torch.randn(7), torch.randn(3)]
    grads = [torch.randn(5, 2), torch.randn(3)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            flat = kernels._FUSED["gather_copy_in"](shards, "bfloat16,bfloat16")
            rows = kernels._FUSED["reduce_copy_in"](grads, [0, 0], 2, torch.float32, None, 2.0)
            (whole,) = kernels._FUSED["gather_copy_out"](flat, "10@0:bfloat16", 1)
    assert torch.equal(flat, torch.cat(shards).bfloat16()) and torch.equal(whole, flat)
    assert torch.equal(rows, kernels.REDUCE_COPY_IN(grads, [0, 0], 2, torch.float32, None, 2.0))
    assert [str(warning.message) for warning in caught] == [f"graphshard: {why}"]
