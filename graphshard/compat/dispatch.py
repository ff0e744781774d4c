"""What is private of torch about modes that see each operator."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class _Seen(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, look: Callable[[Any], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._look = look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._look(func)
        return func(*args, **(kwargs or {}))


def each_operator(look: Callable[[Any], object]) -> AbstractContextManager[Any]:
    """Inside, `look` is shown every operator before it runs, those that others are made of and those of autograd, too;
    it may raise.
    """
    return _Seen(look)
