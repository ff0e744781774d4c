"""What the tests of this folder share: which library an example needs, and a rank made ready for it."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings

import pytest
import torch.distributed as dist

# example -> package of the extra "examples" that it needs
NEEDS = {
    "plain_loop": "torch",
    "accelerate_loop": "accelerate",
    "fabric_loop": "lightning_fabric",
    "lightning_trainer": "pytorch_lightning",
    "titan_parallelize": "torchtitan",
}


def need(package: str) -> None:
    """Skips a test where a package is not installed."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'graphshard[examples]' (torchtitan: see make examples)")


def as_torchrun_does() -> None:
    """Sets what trainers look for, and forgets what the last task's accelerate knew."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "tests"}
    warnings.simplefilter("ignore")  # theirs
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
