"""Collectives that a piece of code really launched, counted by the autograd profiler.

The profiler sees the calls to the process group itself, from eager FSDP2 and from compiled programs alike, and unlike a
dispatch mode it changes neither what Dynamo does nor the model's hooks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from torch.autograd.profiler import profile

from graphshard.compat.profiler import profiled_names

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")

# c10d::_allgather_base_, c10d::allgather_into_tensor_coalesced_, c10d::_reduce_scatter_base_, c10d::allreduce_, ...
_EVENT = re.compile(r"c10d::_?(all_?gather|reduce_?scatter|all_?reduce)")
_NAMES = {name.replace("_", ""): name for name in COLLECTIVES}


@contextmanager
def count_launches() -> Iterator[dict[str, int]]:
    """Counts launches on this rank; the dict that it yields is filled at the end, with each of `COLLECTIVES`.

    What is launched inside must be awaited inside: torch's profiler records what the threads of gloo do, and crashes
    when it stops before they have.
    """
    counts = dict.fromkeys(COLLECTIVES, 0)
    with profile(use_kineto=False) as profiler:
        yield counts
    for name in profiled_names(profiler):
        if found := _EVENT.match(name):
            counts[_NAMES[found[1].replace("_", "")]] += 1
