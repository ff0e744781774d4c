"""Classes whose parameters are properties: markers while a graph is traced, gathered tensors where a forward runs
outside a graph.

A marked class is made once per (class, names of its sharded parameters) and shared by all models; all that differs
between instances is data on the instance, which Dynamo guards. So one compiled region serves every equal block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from graphshard.compat import inline_only, module_call
from graphshard.markers import UNSHARD

# On the instance: {parameter name: arguments of graphshard::unshard}, and the engine that runs it.
SHARDS = "_graphshard_shards"
ENGINE = "_graphshard_engine"


class Engine(Protocol):
    """What a marked module asks of the engine that runs its model."""

    running: bool

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls `module` the way its model runs now."""

    def unshard_outside(self, module: nn.Module, name: str) -> Tensor:
        """Gathers one parameter in the middle of a forward that no graph covers."""


_MARKED: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}


def marked_class(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The marked class of `cls` whose sharded parameters are `names`."""
    if (cls, names) not in _MARKED:
        body: dict[str, Any] = {name: _parameter_property(name) for name in names}
        body["__call__"] = _call
        body["__module__"] = cls.__module__
        body["__doc__"] = cls.__doc__
        if issubclass(cls, nn.RNNBase):
            body["_flat_weights"] = property(_read_flat_weights, _write_flat_weights)
        _MARKED[cls, names] = type(cls.__name__, (cls,), body)
    return _MARKED[cls, names]


# Whether an engine runs its model: a trace made then is graphshard's own. A bool: Dynamo would make an int symbolic.
_own_trace = False


@contextmanager
def tracing() -> Iterator[None]:
    """Inside, what Dynamo traces is captured for an engine; any other trace calls the model as a whole."""
    global _own_trace
    before, _own_trace = _own_trace, True
    try:
        yield
    finally:
        _own_trace = before


def _parameter_property(name: str) -> property:
    def read(self: nn.Module) -> Any:
        if torch.compiler.is_compiling():
            return UNSHARD(*self.__dict__[SHARDS][name]) if _own_trace else self._parameters[name]
        engine: Engine = self.__dict__[ENGINE]
        return engine.unshard_outside(self, name) if engine.running else self._parameters[name]

    return property(inline_only(read))


@inline_only
def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if _own_trace and torch.compiler.is_compiling():
        return module_call(self, *args, **kwargs)
    engine: Engine = self.__dict__[ENGINE]
    return engine.call(self, args, kwargs)


# An RNN keeps its parameters in a list too, which no property would see.
@inline_only
def _read_flat_weights(self: Any) -> Any:
    if torch.compiler.is_compiling() or self.__dict__[ENGINE].running:
        return list(map(self.__getattribute__, self._flat_weights_names))
    return self.__dict__["_flat_weights"]


def _write_flat_weights(self: Any, weights: Any) -> None:
    self.__dict__["_flat_weights"] = weights


def entry_point(cls: type[nn.Module]) -> Callable[..., Any]:
    """A function that calls a module, with a code object of its own.

    Dynamo keeps its compiled code, and counts recompilations, per code object: so each marked class of each model gets
    one.
    """

    def call_module(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return module_call(module, *args, **kwargs)

    call_module.__code__ = call_module.__code__.replace(co_name=f"call_{cls.__name__}")
    return call_module
