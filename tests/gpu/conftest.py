"""Ranks for the tests of this folder, which need a CUDA GPU: without one they are all skipped, for one reason.

Every body runs in a worker, so that what a fault leaves of its CUDA context ends with it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from graphshard.testing import WorkerPool, pool, shutdown_pools
from graphshard.testing.devices import why_no_gpu


@pytest.fixture(scope="session", autouse=True)
def _gpu() -> Iterator[None]:
    if (why := why_no_gpu()) is not None:
        pytest.skip(why)
    yield
    shutdown_pools()


@pytest.fixture(scope="session")
def gpu() -> WorkerPool:
    """One process on the GPU, its process group gloo's."""
    return pool(1, device="cuda")


@pytest.fixture(scope="session")
def nccl_rank() -> WorkerPool:
    """The one rank of an NCCL process group."""
    return pool(1, device="cuda", backend="nccl")


@pytest.fixture(scope="session")
def gloo_pair() -> WorkerPool:
    """Two ranks that share the GPU, over gloo."""
    return pool(2, device="cuda")
