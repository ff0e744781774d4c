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
from torch.compiler import is_compiling
from torch.distributed.fsdp import FSDPModule, UnshardHandle
from torch.distributed.tensor import DTensor

from graphshard.capture.parameters_in_forward import FORWARD, parameters_in_forward
from graphshard.capture.spmd_parameters import on_whole_mesh
from graphshard.capture.twin_asking import traced_once
from graphshard.compat.autograd import called_to_reduce_grads, half_of_backward
from graphshard.compat.dynamo import inline_only, uncaptured
from graphshard.errors import UnsupportedModel
from graphshard.graph.elsewhere import ELSEWHERE
from graphshard.graph.extensions import EXTENDED
from graphshard.graph.markers import UNSHARD

# On the instance: the engine that runs it.
ENGINE = "_graphshard_engine"
SHARD_PREFIX = "_graphshard_shard_"


def shard_key(name: str) -> str:
    """Of what an instance holds for a parameter (see `Shard.marker_args`)."""
    return SHARD_PREFIX + name


class ModelRunner(Protocol):
    """What marked modules ask of what runs their model."""

    @property
    def running(self) -> bool:
        """Whether a forward of the model runs."""

    @property
    def reads_gathered(self) -> bool:
        """Whether what reads a parameter now, outside any graph, is a forward, or one that a checkpoint recomputes."""

    @property
    def compiled(self) -> bool:
        """Whether graphshard runs the model; else FSDP2's hooks do."""

    def has_other_values(self, module: nn.Module) -> bool:
        """Whether something else stands in the place of a parameter inside `module` now."""

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls `module` the way its model runs now."""

    def call_method(self, module: nn.Module, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a registered forward method of `module` the way its model runs now."""

    def unshard_outside(self, module: nn.Module, name: str) -> Tensor:
        """Gathers one parameter in the middle of a forward that no graph covers."""

    def is_gathered(self, module: nn.Module, name: str) -> bool:
        """Whether code around graphs has a parameter gathered now."""

    def handed_out(self, module: nn.Module, name: str) -> None:
        """Is told that code around graphs has a parameter as a shard."""

    def put_back(self, module: nn.Module, name: str, value: Tensor) -> None:
        """Has a parameter in its place again, where forward took it out and registers what it had read of it."""

    def unshard(self, module: nn.Module, async_op: bool) -> UnshardHandle | None:
        """`FSDPModule.unshard`."""

    def reshard(self, module: nn.Module) -> None:
        """`FSDPModule.reshard`."""

    def reshard_all(self) -> None:
        """Frees all parameters that stay gathered."""

    def reset_iter_state(self) -> None:
        """`FSDPModule.reset_iter_state`."""

    def reduce_held(self) -> None:
        """Reduces what earlier backwards left unreduced."""

    def wait_for_optimizer(self, event: Any) -> None:
        """`FSDPModule.set_post_optim_event`."""

    def begin_half(self, half: str) -> None:
        """A pipeline stage is about to run the half of a backward for its ``"input"``, or for each ``"weight"``."""


# In a marked class: the call of the class that it marks.
_OWN_CALL = "_graphshard_own_call"
# In a marked class: that class.
_OWN_CLASS = "_graphshard_own_class"
_MARKED: dict[tuple[type[nn.Module], tuple[str, ...], bool], type[nn.Module]] = {}
_AROUND: dict[type[nn.Module], type[nn.Module]] = {}


def marked_class(cls: type[nn.Module], names: tuple[str, ...], may_have_twins: bool = False) -> type[nn.Module]:
    """The marked class of `cls` whose sharded parameters are `names`; of blocks that may be alike, if so."""
    if (cls, names, may_have_twins) not in _MARKED:
        body: dict[str, Any] = _seen_as(cls) | {name: _parameter_property(name) for name in names}
        body["__call__"] = _calling(traced_once(cls.__call__) if may_have_twins else cls.__call__)
        body[_OWN_CALL] = cls.__call__
        body["register_buffer"] = _registering(cls.register_buffer, names)
        if issubclass(cls, nn.RNNBase):
            body["_flat_weights"] = property(_read_flat_weights, _write_flat_weights)
        bases: tuple[type, ...] = (cls,)
        if issubclass(cls, FSDPModule):
            bases = (_UnitMethods, cls)
        _MARKED[cls, names, may_have_twins] = type(cls.__name__, bases, body)
    return _MARKED[cls, names, may_have_twins]


def marked_around(cls: type[nn.Module]) -> type[nn.Module]:
    """The marked class of modules around those that own sharded parameters: it answers for these."""
    if cls not in _AROUND:
        _AROUND[cls] = type(cls.__name__, (cls,), _seen_as(cls) | {"__call__": _calling_around(cls.__call__)})
    return _AROUND[cls]


@inline_only
def own_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that a marked one marks; another one itself."""
    own: type[nn.Module] = vars(cls).get(_OWN_CLASS, cls)
    return own


def _seen_as(cls: type[nn.Module]) -> dict[str, Any]:
    """What every class has that marks `cls`."""
    asked = parameters_in_forward(cls, _begin_half, _in_forward, _is_gathered, shard_key, _hand_out)
    return {"__module__": cls.__module__, "__doc__": cls.__doc__, _OWN_CLASS: cls} | asked


@inline_only
def _begin_half(module: nn.Module) -> None:
    """Tells the engine, if what asks for parameters is a pipeline stage that is about to run one half of a backward."""
    if not is_compiling() and (half := half_of_backward()) is not None and ENGINE in module.__dict__:
        module.__dict__[ENGINE].begin_half(half)


@inline_only
def _in_forward(module: nn.Module) -> bool:
    """Whether a forward of a module's model runs, is recomputed or traced."""
    if is_compiling():
        return _own_trace
    engine: ModelRunner | None = module.__dict__.get(ENGINE)  # a slice of a container is of its class, and has none
    return engine is not None and engine.reads_gathered


@inline_only
def _is_gathered(module: nn.Module, name: str) -> bool:
    """Whether a parameter is gathered, for who asks in a forward."""
    held = module.__dict__
    if is_compiling() or FORWARD not in held or shard_key(name) not in held:
        return FORWARD in held and bool(held[FORWARD].runs)
    engine: ModelRunner = held[ENGINE]
    return engine.is_gathered(module, name)


@inline_only
def _hand_out(module: nn.Module, name: str) -> None:
    """Tells the engine that code around graphs has a shard, which it may write in ways that torch does not count."""
    if not is_compiling() and shard_key(name) in module.__dict__:
        engine: ModelRunner = module.__dict__[ENGINE]
        engine.handed_out(module, name)


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
    key = shard_key(name)

    # Few steps: Dynamo takes them for each parameter of each block.
    def read(self: nn.Module) -> Any:
        if is_compiling():
            if not _own_trace:
                return self._parameters[name]
            held = self.__dict__
            leaf, spec, more = held[key]
            full = UNSHARD(leaf, spec) if more is None else _as_seen(leaf, spec, *more)
            return full if FORWARD not in held or held[FORWARD].runs else ELSEWHERE(full)
        engine: ModelRunner = self.__dict__[ENGINE]
        if name not in self._parameters:
            return instead(self)
        return engine.unshard_outside(self, name) if engine.reads_gathered else self._parameters[name]

    def said(self: nn.Module) -> str:
        return f"{own_class(type(self)).__name__.removeprefix('FSDP')}.{name}"

    # `nn.Module` comes first with what it registers: this is what takes the place of a parameter that was deleted.
    def instead(self: nn.Module) -> Any:
        if name not in self.__dict__:
            raise AttributeError(f"{said(self)}: no such attribute")
        return self.__dict__[name]

    def write(self: nn.Module, value: object) -> None:
        if self.__dict__[ENGINE].compiled:
            raise UnsupportedModel(
                f"{said(self)}: taken out of its module, and another value put in its place; want it to stay, a "
                "parametrization (torch.nn.utils.parametrize) before graphshard.compile or for a while in forward, or "
                "calls in graphshard.eager(model)"
            )
        self.__dict__[name] = value

    def delete(self: nn.Module) -> None:
        instead(self)
        del self.__dict__[name]

    return property(inline_only(read), write, delete)


def _registering(register: Callable[..., None], names: tuple[str, ...]) -> Callable[..., None]:
    """`register_buffer`, which puts a sharded parameter back: a parametrization that forward registers and removes
    (peft's `target_parameters`) leaves what it was made for there, and a gathered parameter is no `nn.Parameter`.
    """

    def register_buffer(self: nn.Module, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        if name not in names or not _put_back(self, name, tensor):
            register(self, name, tensor, persistent)

    return inline_only(register_buffer)


@uncaptured
def _put_back(module: nn.Module, name: str, value: Tensor | None) -> bool:
    engine: ModelRunner = module.__dict__[ENGINE]
    if value is None or not engine.compiled:
        return False
    engine.put_back(module, name, value)
    return True


@inline_only
def _as_seen(leaf: Tensor, spec: str, layout: Any, extension: Any) -> Tensor:
    """A gathered parameter as modules see it (see `Shard.marker_args`)."""
    if extension is None:
        full = UNSHARD(leaf, spec)
    else:
        wire, gather_spec, kind, tensors = extension
        full = EXTENDED(leaf, spec, UNSHARD(leaf, gather_spec, wire), kind, *tensors)
    return full if layout is None else as_tensor_parallel(full, *layout)


@inline_only
def as_tensor_parallel(full: Tensor, mesh: Any, placements: Any, size: str, stride: str, key: str) -> DTensor:
    """This rank's part of a tensor-parallel parameter as a DTensor.

    Args:
        full: the part, gathered over the shards.
        mesh: tensor-parallel mesh.
        placements: on it.
        size: of the whole parameter, as text: Dynamo would make numbers symbolic.
        stride: likewise.
        key: of all that (see `spmd_parameters`), where the mesh has data-parallel axes; else ``""``.
    """
    if key:
        return on_whole_mesh(full, key)
    shape = torch.Size([int(length) for length in size.split("x")])
    strides = tuple([int(length) for length in stride.split("x")])
    return DTensor.from_local(full, mesh, placements, run_check=False, shape=shape, stride=strides)


@inline_only
def own_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls a marked module as its own class does, hooks included: most often `nn.Module.__call__`."""
    return getattr(type(module), _OWN_CALL)(module, *args, **kwargs)


def _calling(call: Callable[..., Any]) -> Callable[..., Any]:
    """`__call__` of a marked class: `call` in a trace, else that of its engine."""

    def call_module(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _own_trace and is_compiling():
            return call(self, *args, **kwargs)
        engine: ModelRunner = self.__dict__[ENGINE]
        return engine.call(self, args, kwargs)

    return inline_only(call_module)


def _calling_around(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, in which nothing is captured while `functional_call` has put other values in the place of parameters."""
    outside = uncaptured(call)

    def call_module(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            engine: ModelRunner | None = self.__dict__.get(ENGINE)
            if engine is not None and engine.running and engine.has_other_values(self):
                return outside(self, *args, **kwargs)
        return call(self, *args, **kwargs)

    return inline_only(call_module)


# An RNN keeps its parameters in a list too, which no property would see.
@inline_only
def _read_flat_weights(self: Any) -> Any:
    if is_compiling() or self.__dict__[ENGINE].running:
        return list(map(self.__getattribute__, self._flat_weights_names))
    return self.__dict__["_flat_weights"]


def _write_flat_weights(self: Any, weights: Any) -> None:
    self.__dict__["_flat_weights"] = weights


class _UnitMethods:
    """FSDP2's methods that a compiled model answers itself; while it runs in eager FSDP2, FSDP2 does."""

    def unshard(self: Any, async_op: bool = False) -> UnshardHandle | None:
        engine: ModelRunner = self.__dict__[ENGINE]
        if not engine.compiled:
            handle: UnshardHandle | None = super().unshard(async_op)  # type: ignore[misc]
            return handle
        return engine.unshard(self, async_op)

    def reshard(self: Any) -> None:
        super().reshard()  # type: ignore[misc]
        self.__dict__[ENGINE].reshard(self)

    def reset_iter_state(self: Any) -> None:
        super().reset_iter_state()  # type: ignore[misc]
        self.__dict__[ENGINE].reset_iter_state()

    def set_requires_gradient_sync(self: Any, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        super().set_requires_gradient_sync(requires_gradient_sync, recurse=recurse)  # type: ignore[misc]
        if requires_gradient_sync and called_to_reduce_grads():
            # A pipeline's REDUCE_GRAD: next it calls FSDP2's own reduction, which holds no gradients.
            self.__dict__[ENGINE].reduce_held()

    def finalize_backward(self: Any, *, async_op: bool = False) -> Any:
        handle = super().finalize_backward(async_op=async_op)  # type: ignore[misc]  # from torch 2.15 on
        self.__dict__[ENGINE].reduce_held()
        return handle

    def set_post_optim_event(self: Any, event: Any) -> None:
        super().set_post_optim_event(event)  # type: ignore[misc]
        self.__dict__[ENGINE].wait_for_optimizer(event)


class Method:
    """A method that `register_fsdp_forward_method` made an entry point.

    Attributes:
        body: what is compiled: casts of the unit's policy around the method; takes the module first.
        name: of the method.
    """

    def __init__(self, method: Callable[..., Any], pre: Callable[..., Any], post: Callable[..., Any]) -> None:
        function = getattr(method, "__func__", method)
        bound = function is not method

        def body(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if (cast := pre(module, args, kwargs)) is not None:
                args, kwargs = cast
            output = function(module, *args, **kwargs) if bound else function(*args, **kwargs)
            changed = post(module, args, output)
            return output if changed is None else changed

        self.body = inline_only(body)
        self.name: str = method.__name__


def forward_method(method: Callable[..., Any], pre: Callable[..., Any], post: Callable[..., Any]) -> Callable[..., Any]:
    """A registered method as a compiled model calls it: inlined in a trace, else through the engine."""
    entry = Method(method, pre, post)
    body = entry.body

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _own_trace and is_compiling():
            return body(self, *args, **kwargs)
        engine: ModelRunner = self.__dict__[ENGINE]
        return engine.call_method(self, entry, args, kwargs)

    return inline_only(call)
