"""The device that ranks compute on: whether it is there, how a worker takes it, what makes its results repeatable."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Devices, and the process groups that ranks on them may have.
BACKENDS = {"cpu": ("gloo",), "cuda": ("gloo", "nccl")}

# cuBLAS adds in one order only with fixed workspaces; TF32 would hide differences behind ten bits of mantissa.
_REPEATABLE_CUDA = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVIDIA_TF32_OVERRIDE": "0"}


def why_no_gpu() -> str | None:
    """Why there is no CUDA GPU to test on; None: there is one. Where NVML can be asked, CUDA is not initialized."""
    if torch.version.cuda is None:
        return f"no CUDA GPU: torch {torch.__version__} is built without CUDA"
    return None if _num_gpus() else f"no CUDA GPU: torch {torch.__version__} sees none"


def _num_gpus() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a driver that is not there
        return torch.cuda.device_count()


def check_device(device: str, backend: str) -> None:
    """Checks that ranks can compute on a kind of device and communicate by a backend.

    Raises:
        ValueError: either is unknown, or they do not go together.
        RuntimeError: no such device is there.
    """
    if device not in BACKENDS:
        raise ValueError(f"device: got {device!r}, want one of {', '.join(map(repr, BACKENDS))}")
    if backend not in BACKENDS[device]:
        wanted = " or ".join(map(repr, BACKENDS[device]))
        raise ValueError(f"backend: got {backend!r} for ranks on {device!r}, want {wanted}")
    if device == "cuda" and (why := why_no_gpu()) is not None:
        raise RuntimeError(f"device: got 'cuda', but {why}; use device='cpu'")


def device_environment(device: str) -> dict[str, str]:
    """Variables for a worker on a kind of device; those that are set already go before."""
    if device == "cpu":
        return {}
    alone = {"NCCL_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {**_REPEATABLE_CUDA, **alone}


def take_device(device: str, rank: int) -> None:
    """Makes this process compute on the GPU of its rank, repeatably, with nothing left of earlier tasks.

    Ranks share GPUs where there are more of them.
    """
    torch.use_deterministic_algorithms(device != "cpu")
    if device == "cpu":
        return
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@contextmanager
def no_synchronization() -> Iterator[None]:
    """What makes the host wait for a GPU inside raises a `RuntimeError`, as far as torch knows of it."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
