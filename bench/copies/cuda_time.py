"""Times calls: on a GPU by events, elsewhere by the host's clock."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

TimedCall = Callable[[], object]

# More than any L2 today. It is written, not read: a copy then finds an L2 full of lines to write back, as in steady
# work, so that what it leaves there itself is not for free.
FLUSH_BYTES = 256 * 2**20
# About 8 ms; the launch queue has room for about 1,000 kernels.
MOST_FLUSHES = 128
WARM_ROUNDS = 2
HOST_LOOPS, HOST_CALLS = 7, 100


@dataclass(frozen=True)
class CallTiming:
    """Of one call.

    Attributes:
        samples_us: of each time.
        with_host: the device waited for the host in most of them.
    """

    samples_us: tuple[float, ...]
    with_host: bool = False

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    @property
    def quartiles_us(self) -> tuple[float, float]:
        if len(self.samples_us) < 2:
            return self.median_us, self.median_us
        low, _, high = statistics.quantiles(self.samples_us, n=4, method="inclusive")
        return low, high


class Timer(Protocol):
    """Where calls run, and how long they take there."""

    device: torch.device

    def times(self, calls: Sequence[TimedCall], rounds: int) -> list[CallTiming]:
        """Calls all in turn, so often; compilation and first allocations are not timed."""

    def synchronize(self) -> None: ...

    def release(self) -> None:
        """Gives memory back that nothing uses."""


class CudaTimer:
    """By events, with nothing in L2 and the call enqueued before the device gets there."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._flushed = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.device)

    def times(self, calls: Sequence[TimedCall], rounds: int) -> list[CallTiming]:
        flushes = [self._flushes(call) for call in calls]
        samples: list[list[tuple[float, bool]]] = [[] for _ in calls]
        for number in range(-WARM_ROUNDS, rounds):  # in warm rounds, addresses of results become the same ones
            for call, count, found in zip(calls, flushes, samples, strict=True):
                sample = self._sample(call, count)
                if number >= 0:
                    found.append(sample)
        return [_timing(found) for found in samples]

    def _flushes(self, call: TimedCall) -> int:
        """How many flushes take the device much longer than the host takes to enqueue the call: results at new
        addresses cost the host more.
        """
        call()
        count = 1
        while count < MOST_FLUSHES and (self._sample(call, count)[1] or self._sample(call, count)[1]):
            count *= 2
        return min(4 * count, MOST_FLUSHES)

    def _sample(self, call: TimedCall, flushes: int) -> tuple[float, bool]:
        """Microseconds, and whether the device was there before the whole call was enqueued."""
        start, end = _event(), _event()
        self.synchronize()
        for _ in range(flushes):
            self._flushed.zero_()
        start.record()
        call()
        end.record()
        late: bool = start.query()
        end.synchronize()
        return 1e3 * start.elapsed_time(end), late

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _timing(samples: Sequence[tuple[float, bool]]) -> CallTiming:
    ahead = [us for us, late in samples if not late]
    if 2 * len(ahead) > len(samples):
        return CallTiming(tuple(ahead))
    return CallTiming(tuple(us for us, _ in samples), with_host=True)


class HostTimer:
    """By the host's clock, on the CPU: shows that everything runs."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def times(self, calls: Sequence[TimedCall], rounds: int) -> list[CallTiming]:
        samples: list[list[float]] = [[] for _ in calls]
        for _ in range(rounds):
            for call, found in zip(calls, samples, strict=True):
                start = time.perf_counter()
                call()
                found.append(1e6 * (time.perf_counter() - start))
        return [CallTiming(tuple(found)) for found in samples]

    def synchronize(self) -> None:
        """Nothing runs behind the host."""

    def release(self) -> None:
        """The CPU's allocator keeps nothing worth it."""


def host_us(timer: Timer, call: TimedCall, calls: int = HOST_CALLS) -> float:
    """Microseconds of the host in a call of a loop that waits for nothing."""
    call()
    samples = []
    for _ in range(HOST_LOOPS):
        timer.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter() - start) / calls)
    timer.synchronize()
    return 1e6 * statistics.median(samples)
