"""What torch's compiler does once in a process, done before anything is measured."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn


def start_compiler(backend: str) -> None:
    """Compiles something else first: what is done once per process or machine (imports, a precompiled header) would
    make the passes' share look smaller.
    """
    factor = 1.0 + random.SystemRandom().random()  # is in no cache, which would leave out what is done once

    def unrelated(x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x * factor, (8,)).relu().sum()

    compiled = torch.compile(unrelated, backend=backend)
    compiled(torch.ones(4, 8, requires_grad=True)).backward()  # type: ignore[no-untyped-call]
    torch.compiler.reset()
