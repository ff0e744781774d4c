"""Functions that models are compiled through."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import nn

# Their names begin so.
_ENTRY = "call_"


def entry_point(cls: type[nn.Module], body: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a module, or another function with it, with a code object of its own.

    Dynamo keeps its compiled code, and counts recompilations, per code object: so each marked class of each model gets
    one.
    """

    def call_module(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return body(module, *args, **kwargs)

    call_module.__code__ = call_module.__code__.replace(co_name=f"{_ENTRY}{cls.__name__}")
    return call_module


def is_entry_point(code: CodeType) -> bool:
    """Whether it is the code of such a function, from its beginning: not of what Dynamo makes of the rest behind a
    graph break.
    """
    return code.co_filename == __file__ and code.co_name.startswith(_ENTRY)
