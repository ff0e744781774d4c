"""Measures collectives: latency and bandwidth over a few sizes, and what one in flight does to compute.

Called on every rank; each sample is the slowest rank's. Collectives have the process group's timeout.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphshard.cost.measure import Samples
from graphshard.cost.rates import CollectiveKind

_c10d = torch.ops._c10d_functional
MEASURED_KINDS: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter", "all_reduce")


def collective_runs(
    samples: Samples, kind: CollectiveKind, sizes_bytes: Sequence[int], group: Any
) -> list[tuple[int, float]]:
    """(Bytes of the full tensor, median microseconds) for each size; a raw sample for each run."""
    ranks = dist.get_world_size(group)
    found = []
    for size in sizes_bytes:
        numel = max(1, size // 4 // ranks) * ranks
        full = torch.ones(numel, device=samples.device)
        shard = torch.ones(numel // ranks, device=samples.device)
        run = _launcher(kind, full, shard, group)
        run()
        times: list[float] = []
        spent_us = 0.0
        while len(times) < samples.runs and (len(times) < 2 or spent_us < samples.limit_s * 1e6):
            _barrier(samples, group)
            times.append(_slowest(samples.once_us(run), samples, group))
            spent_us += times[-1]  # equal on every rank, so that all stop after the same run
        samples.raw.append({"what": kind, "ranks": ranks, "num_bytes": numel * 4, "us": [round(t, 3) for t in times]})
        found.append((numel * 4, statistics.median(times)))
    return found


def fit_alpha_beta(runs: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Microseconds, and microseconds per byte, of the line that fits best; errors count relative to the time.

    Both are at least a ten-thousandth of what the smallest run says: noise may tilt the line below 0.

    Args:
        runs: (bytes, microseconds), of at least two sizes.
    """
    if len({num_bytes for num_bytes, _ in runs}) < 2:
        raise ValueError(f"fit_alpha_beta: got {len(runs)} runs of one size, want at least two sizes")
    scale = float(max(num_bytes for num_bytes, _ in runs))
    rows = torch.tensor([[1.0 / us, num_bytes / scale / us] for num_bytes, us in runs], dtype=torch.float64)
    solution = torch.linalg.lstsq(rows, torch.ones(len(runs), 1, dtype=torch.float64)).solution
    alpha, slope = (float(value) for value in solution[:, 0])
    least = min(us for _, us in runs) * 1e-4
    return max(alpha, least), max(slope, least) / scale


def contention(samples: Samples, num_bytes: int, width: int, group: Any) -> float:
    """By how much a matmul loop takes longer while all-gathers are under way: 0.5 for half as long again."""
    ranks = dist.get_world_size(group)
    numel = num_bytes // 4 // ranks * ranks
    full, shard = torch.ones(numel, device=samples.device), torch.ones(numel // ranks, device=samples.device)
    left = torch.randn(width, width, device=samples.device)
    out = torch.empty_like(left)

    def compute(count: int = 1) -> None:
        for _ in range(count):
            torch.mm(left, left, out=out)

    ratios = []
    for _ in range(max(2, samples.runs)):
        _barrier(samples, group)
        gather_us = _slowest(samples.once_us(_launcher("all_gather", full, shard, group)), samples, group)
        compute_us = samples.once_us(compute)
        loops = max(1, int(0.8 * gather_us / compute_us))
        alone_us = samples.once_us(partial(compute, loops))
        _barrier(samples, group)
        launched = _launch("all_gather", full, shard, group)
        start = time.perf_counter()
        compute(loops)
        if samples.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        together_us = (time.perf_counter() - start) * 1e6
        _c10d.wait_tensor(launched)
        ratios.append(_slowest(together_us / alone_us - 1.0, samples, group))
        samples.raw.append({"what": "contention", "loops": loops, "alone_us": alone_us, "together_us": together_us})
    return max(0.0, statistics.median(ratios))


def _launch(kind: CollectiveKind, full: Tensor, shard: Tensor, group: Any) -> Tensor:
    """Starts what compiled programs start; `wait_tensor` of the result ends it."""
    result: Tensor
    if kind == "all_gather":
        result = _c10d.all_gather_into_tensor(shard, full.numel() // shard.numel(), group.group_name)
    elif kind == "reduce_scatter":
        result = _c10d.reduce_scatter_tensor(full, "sum", full.numel() // shard.numel(), group.group_name)
    else:
        result = _c10d.all_reduce(full, "sum", group.group_name)
    return result


def _launcher(kind: CollectiveKind, full: Tensor, shard: Tensor, group: Any) -> Callable[[], object]:
    return lambda: _c10d.wait_tensor(_launch(kind, full, shard, group))


def _slowest(value: float, samples: Samples, group: Any) -> float:
    found = torch.tensor([value], dtype=torch.float64, device=samples.device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return float(found.item())


def _barrier(samples: Samples, group: Any) -> None:
    _slowest(0.0, samples, group)
