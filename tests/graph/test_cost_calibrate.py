"""Calibration: fits what it is given, keeps raw samples, writes a file that the cost model reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphshard import calibrate
from graphshard.cost import HARDWARE, GroupShape, collective_alpha_beta, find_hardware
from graphshard.cost.measure import Samples, kernel_us, matmul_tflops, memory_gb_s
from graphshard.cost.measure_collectives import fit_alpha_beta
from graphshard.cost.rates import Protocol

SIZES = [2**exponent for exponent in (12, 16, 20, 24)]


@given(st.floats(1, 1e4), st.floats(1e-6, 1e-2))
def test_fit_finds_the_line_that_made_the_runs(alpha: float, beta: float) -> None:
    fitted = fit_alpha_beta([(size, alpha + beta * size) for size in SIZES])
    assert fitted == pytest.approx((alpha, beta), rel=1e-3)


def test_fit_of_noise_stays_above_zero_and_one_size_is_refused() -> None:
    assert min(fit_alpha_beta([(size, 1e6 / size) for size in SIZES])) > 0
    with pytest.raises(ValueError, match="got 2 runs of one size"):
        fit_alpha_beta([(8, 1.0), (8, 2.0)])


@given(st.integers(2, 8), st.floats(1, 1e4))
def test_measured_latency_is_what_the_model_then_says(ranks: int, alpha_us: float) -> None:
    shape = GroupShape(ranks, 1)
    fitted = calibrate._protocol(Protocol("Simple", 8.4, 3.4, 14.0), shape, alpha_us)
    machine = replace(HARDWARE["cpu-gloo"], protocols=(fitted,))
    assert collective_alpha_beta(machine, "all_gather", shape)[0] == pytest.approx(alpha_us)


def test_samples_keep_every_run_and_end_in_time() -> None:
    samples = Samples(torch.device("cpu"), runs=5, limit_s=0.0)
    samples.median_us("nothing", lambda: None, width=1)
    assert [(raw["what"], raw["width"], len(raw["us"])) for raw in samples.raw] == [("nothing", 1, 2)]


def test_measured_rates_are_positive() -> None:
    samples = Samples(torch.device("cpu"), runs=2, limit_s=0.1)
    rates = matmul_tflops(samples, 16)
    assert set(rates) == {"bfloat16", "float16", "float32", "float64"}
    assert min(*rates.values(), memory_gb_s(samples, 4096), kernel_us(samples)) > 0


def test_calibration_writes_a_file_that_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "matmul_tflops", lambda samples, width: matmul_tflops(samples, 16))
    monkeypatch.setattr(calibrate, "memory_gb_s", lambda samples, size: memory_gb_s(samples, 4096))
    monkeypatch.setattr(calibrate, "attention_share", lambda samples, tokens, rates: 0.5)
    path = tmp_path / "here.json"
    assert calibrate.main(["--device", "cpu", "--quick", "--out", str(path)]) == 0
    assert str(path) in capsys.readouterr().out
    measured, row = find_hardware(str(path)), HARDWARE["cpu-gloo"]
    assert measured.name == "cpu-gloo-calibrated"
    assert measured.attention_share == 0.5
    assert measured.sources["memory_gb_s"].startswith("measured by graphshard.calibrate")
    # One rank measures no links: they are the row's, and so are their sources.
    assert (measured.link_gb_s, measured.protocols) == (row.link_gb_s, row.protocols)
    assert measured.sources["link_gb_s"] == row.sources["link_gb_s"]
    content = json.loads(path.read_text())
    assert {"torch", "python", "device", "cores"} <= set(content["machine"])
    assert {"matmul", "copy", "hundred kernels"} == {sample["what"] for sample in content["samples"]}
    # What was measured before is kept where another run does not measure it.
    assert calibrate.main(["--device", "cpu", "--quick", "--out", str(path), "--merge", str(path)]) == 0
    assert find_hardware(str(path)).name == measured.name


def test_calibration_refuses_an_unknown_base(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        calibrate.main(["--device", "cpu", "--merge", "h300"])
    assert "got 'h300', want one of a100" in capsys.readouterr().err
