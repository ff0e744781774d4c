"""What a collective of the pretended network returns: it is awaited in a thread, or on a stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Work
from torch.futures import Future

# Longer than any collective that is worth pretending.
TIMEOUT_S = 60.0


class ThreadWork(Work):
    """Arrives when a thread says so."""

    def __init__(self, outputs: list[Tensor], waited: list[float]) -> None:
        super().__init__()
        self._waited = waited
        self.is_inference = any(output.is_inference() for output in outputs)
        self._arrived = threading.Event()
        self._future: Future[list[Tensor]] = Future()
        self._outputs = outputs
        self._error: BaseException | None = None

    def arrive(self, error: BaseException | None = None) -> None:
        self._error = error
        self._arrived.set()
        if error is None:
            self._future.set_result(self._outputs)
        else:
            self._future.set_exception(error)  # type: ignore[arg-type]

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        start_s = time.perf_counter()
        if not self._arrived.wait(timeout.total_seconds() or TIMEOUT_S):
            raise TimeoutError("loopback: a collective did not arrive in time")
        self._waited.append(1e6 * (time.perf_counter() - start_s))
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._arrived.is_set()

    def get_future(self) -> Future[list[Tensor]]:
        return self._future


class StreamWork(Work):
    """Arrives when a stream is done: a wait orders the current stream behind it.

    Until then it holds the tensors, so that their memory is not used again: what they are on was launched before the
    wait, what comes behind it is ordered. As NCCL's does in torch, and unlike `Tensor.record_stream`, which frees late.
    """

    def __init__(self, outputs: list[Tensor], inputs: Sequence[Tensor], stream: torch.cuda.Stream) -> None:
        super().__init__()
        self._outputs = outputs
        self._held = [*outputs, *inputs]
        self._stream = stream
        self._done = stream.record_event()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        torch.cuda.current_stream(self._stream.device).wait_event(self._done)
        self._held.clear()
        return True

    def is_completed(self) -> bool:
        return self._done.query()

    def get_future(self) -> Future[list[Tensor]]:
        future: Future[list[Tensor]] = Future(devices=[self._stream.device])
        with torch.cuda.stream(self._stream):  # the future is done when the current stream is
            future.set_result(self._outputs)
        return future

    def __del__(self) -> None:
        for tensor in self._held:  # nobody waited
            tensor.record_stream(self._stream)
