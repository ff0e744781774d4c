"""What torch's compiler does once in a process, done before anything is measured."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def start_compiler(backend: str) -> None:
    """Compiles something else first: what is done once per process or machine (imports, a precompiled header) would
    make the passes' share look smaller.
    """

    def unrelated(x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (8,)).relu().sum()

    compiled = torch.compile(unrelated, backend=backend)
    compiled(torch.ones(4, 8, requires_grad=True)).backward()  # type: ignore[no-untyped-call]
    torch.compiler.reset()
