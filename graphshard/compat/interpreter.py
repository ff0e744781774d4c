"""What is private of CPython's interpreter."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FunctionType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# A frame that asks for so many slots gets a chunk of its own, which has nearly as many left for those of its callees.
_SLOTS = 1 << 18


def _called(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return function(*args, **kwargs)


_called_with_room = FunctionType(_called.__code__.replace(co_stacksize=_SLOTS), globals())


def with_room(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls `function` where the frames of all that it calls fit into one chunk of memory.

    Since 3.11 CPython keeps frames in chunks of 16 KiB, and gives a chunk back when the last frame in it ends. Where a
    loop happens to call from the end of one, each call maps and unmaps memory: 7 us instead of 0.05. Tracing a model
    calls so much, so deep, that it takes up to 1.4 times as long, depending on how deep it is called from.

    Costs 10 us.
    """
    result: T = _called_with_room(function, *args, **kwargs)
    return result


def living(cls: type[T]) -> list[T]:
    """All instances of a class that the cyclic collector knows: not those that `gc.freeze` has taken from it.

    Costs 10 ms for 100,000 objects. An object's own `__class__` is not asked: lazy ones import on it.
    """
    return [found for found in gc.get_objects() if issubclass(type(found), cls)]


@contextmanager
def without_collection() -> Iterator[None]:
    """The cyclic collector would walk all that Dynamo keeps, again and again, and find little: 10 % of a first step,
    40 % of the passes.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def roomy(function: Callable[P, T]) -> Callable[P, T]:
    """A function that is always called with room."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        return with_room(function, *args, **kwargs)

    return called
