"""What is private of torch's process groups: their time-out, which they can be given, but do not tell."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout


def timeout_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds after which the collectives of a group fail, of tensors on a device; torch's default where it is not
    told.
    """
    try:
        options = group._get_backend(device).options
        return float(options._timeout.total_seconds())
    except (RuntimeError, AttributeError):  # a group of someone's own
        return default_pg_timeout.total_seconds()
