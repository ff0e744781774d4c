"""What a forward logs once in a process, as by transformers' `logger.warning_once`: no reason to break a graph."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lazy import LazyVariableTracker

log = logging.getLogger(__name__)

_said: set[str] = set()


class OnceLogs(set[Callable[..., Any]]):
    """For Dynamo, which asks of each method of a logger that a captured forward calls whether it is in this set, and
    leaves out those that are.

    Cached ones are (`functools.lru_cache`), which log a message once: it is logged when it is captured, if its
    arguments are constants; else a line says that it is not. Whether its level is on is not asked: ranks log at levels
    of their own, and must not have other graphs for that.

    Args:
        of_user: what the user has left out.
    """

    def __init__(self, of_user: set[Callable[..., Any]]) -> None:
        super().__init__(of_user)

    def __contains__(self, asked: object) -> bool:
        if super().__contains__(asked):
            return True
        if not isinstance(asked, MethodType) or not isinstance(asked.__self__, logging.Logger):
            return False
        if not hasattr(asked, "cache_info"):
            return False
        local = sys._getframe(1).f_locals  # Dynamo's frame that asks: nothing else has the arguments
        args, kwargs = _constants(local.get("args")), _constants(local.get("kwargs"))
        if args is None or kwargs is None:
            _say_once(f"{asked.__self__.name}: {getattr(asked, '__name__', 'a cached method')}")
            return True
        return asked(*args.values(), **{str(name): value for name, value in kwargs.items()}) is None


def _constants(given: object) -> dict[object, Any] | None:
    """Values of Dynamo's, by place or name; None: they are not all constants."""
    if not isinstance(given, (list, tuple, dict)):
        return None
    found: dict[object, Any] = {}
    for key, value in given.items() if isinstance(given, dict) else enumerate(given):
        known = value.realize() if isinstance(value, LazyVariableTracker) else value
        if not isinstance(known, ConstantVariable):  # not what can be made one: a symbolic size would be fixed for that
            return None
        found[key] = known.as_python_constant()
    return found


def _say_once(what: str) -> None:
    if what not in _said:
        _said.add(what)
        log.warning("graphshard: %s of a message that is not constant, in forward: not logged by compiled calls", what)
