"""The engine of one compiled model: its shards, the way it runs now, and what happened so far."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphshard import capture, driver, env, fsdp2
from graphshard.backend import make_backend
from graphshard.casts import cast_hooks
from graphshard.compat import (
    backward_id,
    call_at_end_of_backward,
    dispatch_mode_active,
    hooks_of,
    module_call,
    uncaptured,
)
from graphshard.errors import UnsupportedModel
from graphshard.region import Binding
from graphshard.report import ProgramRecord, Report
from graphshard.shards import Shard, gather_eagerly

_numbers = itertools.count()


@dataclass(frozen=True)
class Options:
    """How a model is compiled: the arguments of `graphshard.compile` that matter after sharding."""

    backend: str = "inductor"
    regions: str = "model"
    fullgraph: bool = False
    dynamic: bool | None = None
    strict: bool = False


def _signature(module: nn.Module) -> object:
    """What modules must have in common to share compiled code beyond what Dynamo guards: it guards no hooks."""
    hooks = ((i, hook) for i, inner in enumerate(module.modules()) for _, hook in hooks_of(inner))
    return type(module), tuple(hooks)


class Engine:
    """Runs an annotated model compiled, or hands it to FSDP2's own hooks.

    Args:
        model: annotated by `fully_shard`.
        options: how to compile it.
    """

    def __init__(self, model: nn.Module, options: Options) -> None:
        self.model = model
        # For dumps: models are compiled in the same order on every rank.
        self.name = f"{type(model).__name__.removeprefix('FSDP')}{next(_numbers)}"
        self.options = options
        self.report = Report()
        self.running = False
        self.bindings: dict[tuple[int, str, tuple[int, ...]], Binding] = {}
        self.shard_at: dict[int, Shard] = {}
        self._compiled = True  # False: FSDP2's hooks run the model
        self._eager_ran = False  # FSDP2's engine may hold gradients, also of a backward that comes later
        self._shards: list[Shard] = []
        self._reshard: list[bool] = []
        self._gathered: dict[tuple[int, bool], Tensor] = {}
        self._backward_id = -1
        self._entries: dict[object, Callable[..., Any]] = {}
        self._modules = list(model.modules())
        self._hook_keys: list[int] = []
        self._signatures: dict[int, object] = {}
        self._backend = make_backend(self, options.backend)
        for name in sorted(env.disabled_passes(driver.OPTIONAL)):
            self.report.say_once(f"pass {name} is left out, as GRAPHSHARD_DISABLE says")
        self._units = fsdp2.find_units(model)
        self._hooks = fsdp2.ForwardHooks(model, cast_hooks)
        if not self._falls_back(unit.unsupported() for unit in self._units):
            self._mark_classes()
            self._hooks.detach()

    # -- set-up

    def _mark_classes(self) -> None:
        names: dict[int, set[str]] = {}
        modules: dict[int, nn.Module] = {id(m): m for m in fsdp2.unit_modules(self.model)}
        for unit in self._units:
            for param in unit.params:
                for module, name in param.owners:
                    modules[id(module)] = module
                    names.setdefault(id(module), set()).add(name)
        for key, module in modules.items():
            module.__dict__[capture.ENGINE] = self
            module.__dict__[capture.SHARDS] = {}
            module.__class__ = capture.marked_class(type(module), tuple(sorted(names.get(key, ()))))
        inner = {id(m) for m in fsdp2.unit_modules(self.model)}
        # With a region per unit, a module that contains units is plain Python around them.
        self._outer = {
            key
            for key, module in modules.items()
            if any(id(child) in inner for child in module.modules() if child is not module)
        }

    def _falls_back(self, reasons: Iterable[str | None]) -> bool:
        """Leaves the model to FSDP2 if there is a reason: said once, an error if `strict`."""
        if (reason := next(filter(None, reasons), None)) is None:
            return False
        line = f"{reason}, which is not compiled yet: the model runs in eager FSDP2"
        if self.options.strict:
            raise UnsupportedModel(f"{line}; got strict=True")
        self.report.say_once(line)
        self._leave_compiled()
        return True

    def _prepare(self) -> bool:
        """Makes ready for a forward; False when the model is to run in eager FSDP2."""
        if self._falls_back(unit.unsupported_now() for unit in self._units):
            return False
        if self._eager_ran:
            self._refuse_held_by_fsdp2()
        if not self._shards:
            fsdp2.lazy_init(self.model)
            for unit in self._units:
                names = fsdp2.parameter_names(self.model, unit.params)
                for index, (param, fqn) in enumerate(zip(unit.params, names, strict=True)):
                    self._shards.append(Shard(param, fqn, index, self.report))
            self._install()
        elif self._watch.changed() or self._reshard != self._reshard_settings():
            for shard in self._shards:
                shard.renew()
            self._install()
        for unit in self._units:
            if not unit.is_sharded:  # unsharded by hand, or by FSDP2's engine: programs gather for themselves
                unit.reshard()
        if self._hook_keys != (keys := [key for module in self._modules for key, _ in hooks_of(module)]):
            self._hook_keys = keys
            self._signatures.clear()
        for unit in self._units:
            if (ignored := unit.ignored()) is not None:
                self.report.say_once(f"{ignored} is ignored")
        return True

    def _install(self) -> None:
        """Puts the leaves where properties and programs find them."""
        self._reshard = self._reshard_settings()
        self._watch = fsdp2.ParameterWatch([shard.param for shard in self._shards])
        self.shard_at = {shard.leaf.data_ptr(): shard for shard in self._shards}
        self.bindings.clear()  # addresses mean nothing any more
        for shard in self._shards:
            for module, name in shard.param.owners:
                module.__dict__[capture.SHARDS][name] = shard.marker_args()

    def _reshard_settings(self) -> list[bool]:
        return [unit.reshard_after_forward for unit in self._units]

    # -- calls

    @uncaptured
    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a marked module: compiled, or by FSDP2's hooks while these are on."""
        if not self._compiled:
            return module_call(module, *args, **kwargs)
        if self.running:
            return self._enter(module, args, kwargs)
        if dispatch_mode_active():
            self.report.say_once("a call under a TorchDispatchMode ran in eager FSDP2")
            with self.eager():
                return module_call(module, *args, **kwargs)
        if not self._prepare():
            return module_call(module, *args, **kwargs)
        self.running = True
        try:
            with capture.tracing():
                return self._enter(module, args, kwargs)
        finally:
            self.running = False
            self._gathered.clear()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.options.regions == "unit" and id(module) in self._outer:
            return module_call(module, *args, **kwargs)
        if (key := self._signatures.get(id(module))) is None:
            key = self._signatures[id(module)] = _signature(module)
        if (entry := self._entries.get(key)) is None:
            entry = self._entries[key] = torch.compile(
                capture.entry_point(type(module)),
                backend=self._backend,
                fullgraph=self.options.fullgraph,
                dynamic=self.options.dynamic,
            )
        return entry(module, args, kwargs)

    @uncaptured
    def unshard_outside(self, module: nn.Module, name: str) -> Tensor:
        """Gathers one parameter in the middle of a forward that no graph covers, once per forward."""
        shard = self.shard_at[module.__dict__[capture.SHARDS][name][0].data_ptr()]

        def count() -> None:
            self.report.eager_unshards[shard.fqn] += 1
            owner = shard.fqn.rpartition(".")[0] or "the root"
            self.report.say_once(
                f"{owner} reads parameters outside any graph: they are gathered and reduced one by one"
            )

        return self._gather(shard, count, None)

    def gather_in_graph(self, leaf: Tensor, forward: ProgramRecord, backward: ProgramRecord) -> Tensor:
        """Gathers one parameter for a graph that runs uncompiled, once per forward."""

        def count() -> None:
            forward.runs += 1

        return self._gather(self.shard_at[leaf.data_ptr()], count, backward)

    def _gather(self, shard: Shard, count: Callable[[], None], backward: ProgramRecord | None) -> Tensor:
        key = (id(shard), torch.is_grad_enabled())
        if (full := self._gathered.get(key)) is None:
            count()
            full = gather_eagerly(shard, backward, self.backward_runs)
            if self.running:  # not when a checkpoint is recomputed in backward: nothing would free it
                self._gathered[key] = full
        return full

    # -- backward

    def backward_runs(self) -> None:
        """Sees to it that what is held is looked at when the running backward ends."""
        if (number := backward_id()) != self._backward_id:
            self._backward_id = number
            call_at_end_of_backward(self._end_backward)

    def _end_backward(self) -> None:
        """Reduces what is held for units that synchronize: parameters that this backward did not reach."""
        self._backward_id = -1
        for shard in self._shards:
            if shard.held is not None and shard.unit.reduce_grads:
                shard.reduce_held()

    # -- engines

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Inside, FSDP2's own hooks run the model.

        Raises:
            RuntimeError: while unreduced gradients are held, by either engine, at entry or at exit.
        """
        if not self._compiled:
            yield
            return
        self._refuse_held("graphshard", [shard.fqn for shard in self._shards if shard.held is not None])
        self._leave_compiled()
        try:
            yield
        finally:
            self._return_compiled()

    def _leave_compiled(self) -> None:
        self._eager_ran = True
        self._hooks.attach()
        self._compiled = False

    def _return_compiled(self) -> None:
        self._hooks.detach()
        self._compiled = True
        self._refuse_held_by_fsdp2()

    def _refuse_held_by_fsdp2(self) -> None:
        self._refuse_held("eager FSDP2", [unit.name or "root" for unit in self._units if unit.holds_unreduced_grads()])

    def _refuse_held(self, holder: str, names: Sequence[str]) -> None:
        if names:
            raise RuntimeError(
                f"graphshard.eager: {holder} holds unreduced gradients of {len(names)} parameters or units "
                f"({names[0]}, ...), which the other engine cannot reduce. Run one backward with "
                "set_requires_gradient_sync(True) before switching"
            )
