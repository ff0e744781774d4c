"""Measures one rank: matmul rates, copy rate, kernel latency. Every measurement is a median and has a deadline."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

_DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass
class Samples:
    """Collects measurements.

    Args:
        device: that runs.
        runs: repetitions of each measurement.
        limit_s: for the repetitions of one measurement; at least two are made.
    """

    device: torch.device
    runs: int
    limit_s: float
    raw: list[dict[str, Any]] = field(default_factory=list)

    def median_us(self, what: str, run: Callable[[], object], **about: object) -> float:
        """The median time of `run()` in microseconds; the first run is not counted.

        Args:
            what: name of the measurement.
            run: does the work; on a GPU it may only launch it.
            about: further words for the raw sample.
        """
        run()
        self.synchronize()
        times: list[float] = []
        end = time.monotonic() + self.limit_s
        while len(times) < self.runs and (len(times) < 2 or time.monotonic() < end):
            times.append(self.once_us(run))
        self.raw.append({"what": what, **about, "us": [round(value, 3) for value in times]})
        return statistics.median(times)

    def once_us(self, run: Callable[[], object]) -> float:
        """The time of one `run()`, its work on the device included, in microseconds."""
        self.synchronize()
        start = time.perf_counter()
        run()
        self.synchronize()
        return (time.perf_counter() - start) * 1e6

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def matmul_tflops(samples: Samples, width: int) -> dict[str, float]:
    """Achieved TFLOP/s of `[width, width]` matmuls of random numbers, by dtype name."""
    rates = {}
    for name in _DTYPES:
        left = torch.randn(width, width, device=samples.device).to(getattr(torch, name))
        right = torch.randn(width, width, device=samples.device).to(getattr(torch, name))
        out = torch.empty_like(left)
        took_us = samples.median_us("matmul", partial(torch.mm, left, right, out=out), dtype=name, width=width)
        rates[name] = 2 * width**3 / took_us / 1e6
    return rates


def attention_share(samples: Samples, tokens: int, rates: Mapping[str, float]) -> float:
    """What fused attention achieves, of the matmul rate in its dtype; at most 1.

    Args:
        samples: collects.
        tokens: length of the sequence.
        rates: TFLOP/s of matmuls by dtype name.
    """
    name = "bfloat16" if samples.device.type == "cuda" else "float32"
    query = torch.randn(1, 8, tokens, 64, device=samples.device, dtype=getattr(torch, name))
    attend = torch.nn.functional.scaled_dot_product_attention
    took_us = samples.median_us("attention", lambda: attend(query, query, query), dtype=name, tokens=tokens)
    return min(1.0, 4 * 8 * tokens**2 * 64 / took_us / 1e6 / rates[name])


def memory_gb_s(samples: Samples, num_bytes: int) -> float:
    """Achieved rate of a copy, bytes read plus written."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=samples.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / samples.median_us("copy", lambda: target.copy_(source), num_bytes=num_bytes) / 1e3


def kernel_us(samples: Samples) -> float:
    """Least time of one kernel: a hundred tiny ones, one after the other."""
    value = torch.zeros(1, device=samples.device)

    def hundred() -> None:
        for _ in range(100):
            value.add_(1.0)

    return samples.median_us("hundred kernels", hundred) / 100
