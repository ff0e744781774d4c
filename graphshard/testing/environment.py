"""Environment variables of worker processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def worker_environment() -> dict[str, str]:
    """This process's variables, and those that libraries read while they are imported."""
    wanted = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    wanted["KINETO_LOG_LEVEL"] = "6"  # the profiler's own words would hide those of a failed test
    if sys.platform == "linux":
        wanted["GLOO_SOCKET_IFNAME"] = "lo"  # a host name may not resolve inside a container
    return {**wanted, **os.environ}


@contextmanager
def exported(variables: dict[str, str]) -> Iterator[None]:
    """Sets variables for the processes that are started inside."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
