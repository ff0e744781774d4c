"""A network in one process: collectives of `world_size` ranks whose peers mirror this one.

    with Loopback(world_size=8, alpha_us=32.0, gb_s=361.0) as network:
        mesh = init_device_mesh("cuda", (8,))        # FSDP2, DTensor, functional collectives, graphshard: as over NCCL

A timing instrument. What is gathered is this rank's part, W times; what is reduced is the sum, or the mean, of W equal
parts: the results of one step are right where all ranks hold the same, and nothing is trained. A collective takes
`alpha_us` and its bytes at `gb_s`, one after the other, beside the computation: on CPU in a thread, on CUDA on a stream
of its own, where a wait orders streams and never the host. There is no all-to-all, send or gather to one rank, for
which torch asks backends of C++, and no sum with a factor.

Source: NCCL's one communication stream; time by latency and bandwidth, as in its own tests.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from bench.networks.loopback_works import TIMEOUT_S, StreamWork, ThreadWork
from bench.networks.python_group import PythonGroup
from graphshard.compat.groups import register_work, resolve_process_group

BACKEND = "loopback"
MAX_US = 2e6  # of a latency


@dataclass(frozen=True)
class Network:
    """What is pretended.

    Attributes:
        alpha_us: latency of a collective.
        gb_s: bus bandwidth: of the bytes that a rank sends, in GB/s.
        late: bytes move when the time is up, not when it begins: what is written or read too early is then seen.
    """

    alpha_us: float = 20.0
    gb_s: float = 50.0
    late: bool = False

    def us(self, sent_bytes: float) -> float:
        """Of a collective in which each rank sends so much."""
        return self.alpha_us + sent_bytes / (self.gb_s * 1e3)


@dataclass(frozen=True)
class Launch:
    """One collective: its kind, the bytes that a rank sends, the time that it takes from its start."""

    kind: str
    sent_bytes: int
    us: float


class LoopbackGroup(PythonGroup):
    """One process group. What c10d, the functional collectives and DTensor call, by the names of all torch versions.

    Args:
        rank: this rank.
        size: number of ranks.
        of: says what is pretended, and is told of every collective.
    """

    # c10d asks the backend that runs the collectives; here that is the group itself.
    supports_coalescing = True
    # graphshard asks: there is nobody to agree with.
    pretends_peers = True

    def __init__(self, rank: int, size: int, of: Loopback) -> None:
        super().__init__(rank, size, BACKEND)
        self._of = of
        self._queue: queue.SimpleQueue[tuple[ThreadWork, Callable[[], None], float] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None

    # -- collectives

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], _: Any = None
    ) -> Any:
        def gather() -> None:
            for output, own in zip(outputs, inputs, strict=True):
                rows = output.view(self._size, -1)
                if output.untyped_storage().data_ptr() == own.untyped_storage().data_ptr():
                    own = own.clone()  # FSDP2 gathers in place
                rows.copy_(own.reshape(1, -1).expand_as(rows))

        return self._launch("all_gather", outputs, inputs, gather, _num_bytes(outputs) * (self._size - 1) / self._size)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any = None
    ) -> Any:
        times = self._times(options)

        def reduce() -> None:
            for output, whole in zip(outputs, inputs, strict=True):
                own = whole.reshape(self._size, -1)[self._rank].view_as(output)
                output.copy_(own if times == 1 else own * times)

        sent = _num_bytes(inputs) * (self._size - 1) / self._size
        return self._launch("reduce_scatter", outputs, inputs, reduce, sent)

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> Any:
        times = self._times(options)

        def reduce() -> None:
            for tensor in tensors:
                if times != 1:
                    tensor.mul_(times)

        sent = 2 * _num_bytes(tensors) * (self._size - 1) / self._size
        return self._launch("all_reduce", tensors, (), reduce, sent)

    def broadcast(self, tensors: Sequence[Tensor], _: Any = None) -> Any:
        return self._launch("broadcast", tensors, (), _nothing, _num_bytes(tensors))

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], _: Any = None) -> Any:
        def scatter() -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                output.copy_(parts[self._rank])

        return self._launch("scatter", outputs, (), scatter, _num_bytes(outputs) * (self._size - 1))

    def barrier(self, opts: Any = None) -> Any:
        return self._launch("barrier", (torch.empty(0),), (), _nothing, 0)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], _: Any = None) -> Any:
        def gather() -> None:
            for parts, own in zip(outputs, inputs, strict=True):
                for part in parts:
                    part.copy_(own)

        flat = [part for parts in outputs for part in parts]
        return self._launch("all_gather", flat, inputs, gather, _num_bytes(inputs) * (self._size - 1))

    def _allgather_base(self, output: Tensor, own: Tensor, options: Any = None) -> Any:
        return self.allgather_into_tensor_coalesced([output], [own], options)

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, options: Any = None) -> Any:
        return self.reduce_scatter_tensor_coalesced([output], [whole], options)

    # Names since torch 2.13.
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    all_gather_single = _allgather_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    allreduce_coalesced = allreduce

    def _times(self, options: Any) -> int:
        op = dist.ReduceOp.SUM if options is None else options.reduceOp
        if op == dist.ReduceOp.SUM:
            return self._size
        if op == dist.ReduceOp.AVG or op == dist.ReduceOp.MAX or op == dist.ReduceOp.MIN:
            return 1  # of equal parts
        raise NotImplementedError(f"loopback: got {op}, want SUM, AVG, MAX or MIN")

    # -- time

    def _launch(
        self,
        kind: str,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        move: Callable[[], None],
        sent_bytes: float,
    ) -> Any:
        us = self._of.network.us(sent_bytes)
        self._of.launches.append(Launch(kind, int(sent_bytes), us))
        is_cuda = outputs[0].is_cuda
        work = self._launch_on_stream(list(outputs), inputs, move, us) if is_cuda else self._queued(outputs, move, us)
        self._of.on_launch()
        return work

    def _queued(self, outputs: Sequence[Tensor], move: Callable[[], None], us: float) -> ThreadWork:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, daemon=True, name="loopback")
            self._thread.start()
        work = ThreadWork(list(outputs), self._of.waited_us)
        self._queue.put((work, move, us))
        return work

    def _serve(self) -> None:
        """One collective after the other, as on one communication stream."""
        while (item := self._queue.get()) is not None:
            work, move, us = item
            end_s = time.perf_counter() + us / 1e6
            try:
                if self._of.network.late:
                    time.sleep(us / 1e6)
                with torch.inference_mode(work.is_inference), torch.no_grad():
                    move()
                time.sleep(max(0.0, end_s - time.perf_counter()))
            except BaseException as error:  # a waiter must not hang
                work.arrive(error)
            else:
                work.arrive()

    def _launch_on_stream(
        self, outputs: list[Tensor], inputs: Sequence[Tensor], move: Callable[[], None], us: float
    ) -> StreamWork:
        from bench.networks import hold_stream  # needs Triton

        device = outputs[0].device
        if self._stream is None:
            # Its blocks are few and small: behind those of a matrix product a collective would begin late.
            self._stream = torch.cuda.Stream(device, priority=-1)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream), torch.no_grad():  # and on its device, where Triton launches
            begun = hold_stream.mark(device)
            if not self._of.network.late:
                move()
            hold_stream.hold(begun, us)
            if self._of.network.late:
                move()
        return StreamWork(outputs, inputs, self._stream)

    def shutdown(self) -> None:
        """Ends the thread, behind what is launched."""
        self._queue.put(None)
        if self._thread is not None:  # one that frees tensors while Python ends would abort it
            self._thread.join(TIMEOUT_S)
            self._thread = None


class Loopback:
    """The default process group, pretended, while a `with` lasts.

    Args:
        world_size: number of ranks.
        alpha_us, gb_s, late: of the network.
        rank: this one.
        on_launch: called behind each launch, in the thread and on the stream that launched.

    Attributes:
        launches: every collective of every group, in order.
        waited_us: on the CPU, how long each wait stood still.

    Raises:
        ValueError: an argument that no network has.
        RuntimeError: on entering: a process group is there already.
    """

    def __init__(
        self,
        world_size: int,
        alpha_us: float = 20.0,
        gb_s: float = 50.0,
        rank: int = 0,
        late: bool = False,
        on_launch: Callable[[], object] | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"loopback: got rank {rank} of {world_size}, want one from 0 to below the world size")
        if not (0.0 <= alpha_us <= MAX_US and gb_s > 0.0):
            got = f"got {alpha_us:g} us and {gb_s:g} GB/s"
            raise ValueError(f"loopback: {got}, want a latency from 0 to {MAX_US:g} us, and a bandwidth above 0")
        self.launches: list[Launch] = []
        self.waited_us: list[float] = []
        self._world_size, self._rank = world_size, rank
        self.network = Network(alpha_us, gb_s, late)
        self.on_launch = on_launch or _nothing
        self._groups: list[LoopbackGroup] = []
        self._library: Any = None

    def __enter__(self) -> Self:
        if dist.is_initialized():
            raise RuntimeError("loopback: got a process group that is there already, want none: destroy it first")
        _current.append(self)
        if BACKEND not in dist.Backend.backend_list:
            dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(BACKEND, rank=self._rank, world_size=self._world_size, store=store)
        # torch before 2.15 asks a C++ backend for this one, and no group of Python's.
        self._library = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
        for key in ("CPU", "CUDA"):
            self._library.impl("all_gather_into_tensor_out", _gather_into, key)
        return self

    def group(self, rank: int, size: int) -> LoopbackGroup:
        """A new group on this network."""
        self._groups.append(LoopbackGroup(rank, size, self))
        return self._groups[-1]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._library = None
        dist.destroy_process_group()
        for group in self._groups:
            group.shutdown()
        _current.remove(self)


def _gather_into(own: Tensor, world_size: int, group_name: str, *, out: Tensor) -> Tensor:
    group: Any = resolve_process_group(group_name)
    register_work(out, group.allgather_into_tensor_coalesced([out], [own]))
    return out


# c10d calls the backend's constructor, which learns here what to pretend.
_current: list[Loopback] = []


def _create(options: Any, _: Any = None) -> LoopbackGroup:
    return _current[-1].group(options.group_rank, options.group_size)


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _nothing() -> None:
    pass
