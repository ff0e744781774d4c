"""What a measurement ran on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

import graphshard

# Of the cores, before the bench starts: above it, others' work is in every number.
MAX_IDLE_LOAD = 0.25


def versions() -> dict[str, str]:
    """Of what was measured, for JSON files."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "graphshard": graphshard.__version__,
    }


@dataclass(frozen=True)
class Machine:
    """The machine, and how busy it was when the bench began."""

    torch_version: str
    python_version: str
    system: str
    cpu: str
    cores: int
    load: float

    @property
    def busy(self) -> bool:
        return self.load > MAX_IDLE_LOAD * self.cores

    @staticmethod
    def this() -> Machine:
        return Machine(
            torch.__version__,
            platform.python_version(),
            f"{platform.system()} {platform.machine()}",
            _cpu_model(),
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            os.getloadavg()[0],
        )


@dataclass(frozen=True)
class Gpu:
    """The GPU, and what drives it."""

    name: str
    memory_bytes: int
    driver_version: str
    cuda_version: str
    triton_version: str

    @staticmethod
    def this(device: torch.device) -> Gpu:
        properties = torch.cuda.get_device_properties(device)
        return Gpu(
            properties.name,
            properties.total_memory,
            _driver_version(),
            torch.version.cuda or "none",
            _version_of("triton"),
        )


def _driver_version() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout
    return next(iter(said.split()), "unknown")


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
