"""A process group and tensors that are not there: what tracing for many ranks on one laptop needs of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_process_group(world_size: int) -> Iterator[None]:
    """Inside, this process is rank 0 of `world_size` ranks whose collectives do nothing.

    Raises:
        RuntimeError: if a process group is there already.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "scale: a process group is there already, want none: models are traced under a fake one; run the study in "
            "a process of its own"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
