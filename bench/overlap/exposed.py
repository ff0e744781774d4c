"""Time in which only communication runs, read off a trace of a CUDA GPU."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")


class Span(NamedTuple):
    """From and to, in microseconds."""

    start_us: float
    end_us: float


class Occupied(NamedTuple):
    """What a GPU did in a while, in microseconds.

    Attributes:
        computing_us: some stream but that of the network was busy.
        communicating_us: the stream of the network was.
        exposed_us: only that one was.
    """

    computing_us: float
    communicating_us: float
    exposed_us: float


def joined(spans: Iterable[Span]) -> list[Span]:
    """The same time, without overlaps, in order."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.start_us <= found[-1].end_us:
            found[-1] = Span(found[-1].start_us, max(found[-1].end_us, span.end_us))
        else:
            found.append(span)
    return found


def length_us(spans: Iterable[Span]) -> float:
    """Of spans that do not overlap."""
    return sum(span.end_us - span.start_us for span in spans)


def occupied(computing: Sequence[Span], communicating: Sequence[Span]) -> Occupied:
    """What overlaps, and what does not."""
    computing, communicating = joined(computing), joined(communicating)
    both = joined([*computing, *communicating])
    return Occupied(length_us(computing), length_us(communicating), length_us(both) - length_us(computing))


def read_trace(events: Sequence[dict[str, Any]], is_network: Callable[[str], bool]) -> Occupied:
    """Sorts the kernels of a chrome trace by stream.

    Args:
        events: its ``traceEvents``.
        is_network: whether a kernel of this name runs on the stream of the network only.

    Raises:
        ValueError: no kernel of the network is there.
    """
    kernels = [event for event in events if event.get("cat") in _KINDS and event.get("dur") is not None]
    streams = {event["args"]["stream"] for event in kernels if is_network(event["name"])}
    if not streams:
        raise ValueError(f"trace: got no kernel of the network among {len(kernels)}, want some")
    spans: tuple[list[Span], list[Span]] = ([], [])
    for event in kernels:
        start_us = float(event["ts"])
        spans[event["args"]["stream"] in streams].append(Span(start_us, start_us + float(event["dur"])))
    return occupied(*spans)


def traced(run: Callable[[], object], is_network: Callable[[str], bool]) -> Occupied | None:
    """Runs something on the current GPU under torch's profiler; None where that sees no kernels.

    A GPU's counters may be out of a user's reach.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return read_trace(events, is_network) if any(event.get("cat") in _KINDS for event in events) else None
