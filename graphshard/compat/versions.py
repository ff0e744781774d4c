"""Which versions of torch graphshard supports."""

from __future__ import annotations

import torch

SUPPORTED = ((2, 11), (2, 15))


def check_torch_version() -> None:
    """Raises:
    RuntimeError: if the installed torch is not one that graphshard supports.
    """
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if not SUPPORTED[0] <= (major, minor) <= SUPPORTED[1]:
        low, high = (".".join(map(str, version)) for version in SUPPORTED)
        raise RuntimeError(f"graphshard: got torch {torch.__version__}, want {low} to {high}; install one of these")
